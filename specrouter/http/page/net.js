// Asking the service: JSON posts and server-sent events, by fetch, with the key in a header.

const STORED = "specrouter-key"; // of this tab, until it is closed
let key = sessionStorage.getItem(STORED) ?? "";

export const hasKey = () => key !== "";

export function setKey(text) {
  key = text;
  sessionStorage.setItem(STORED, text);
}

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The answer of a path; a body makes it a POST. Throws a `Refusal`. */
async function fetched(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const asked = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const answer = await fetch(path, { ...asked, headers, signal, credentials: "omit" });
  if (!answer.ok) {
    const error = await answer.json().catch(() => ({}));
    throw new Refusal(answer.status, error.error?.message ?? `the service answered ${answer.status}`);
  }
  return answer;
}

/** What a path answers, parsed. */
export const ask = async (path, body, signal) => (await fetched(path, body, signal)).json();

/** The events of a path, parsed, until `[DONE]` or the end. */
export async function* events(path, body, signal) {
  const answer = await fetched(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", end; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const data = text.slice(0, end).replace(/^data: /, "");
      text = text.slice(end + 2);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
