// The page: connects to the feed, asks for a key where one is needed, and puts the parts together.
import { html, render, useEffect, useMemo, useState } from "./vendor/htm-preact-standalone.js";
import { Cycles, Decision, Models, Requests, Speed, Switches } from "./live.js";
import { events, hasKey, setKey } from "./net.js";
import { Try } from "./try.js";
import { marksOf, whole } from "./words.js";

const KEPT = 600; // seconds of history
const RECENT = 120;

/** What came between two snapshots of one engine; null where it began anew. */
function between(before, now) {
  const seconds = now.unix_s - before.unix_s;
  const produced = now.totals.produced_tokens - before.totals.produced_tokens;
  if (produced < 0 || seconds <= 0) return null;
  const sum = (one, name) => one.chains.reduce((total, chain) => total + chain[name], 0);
  const passes = sum(now, "cycles") - sum(before, "cycles");
  const perPass = passes > 0 ? (sum(now, "tokens") - sum(before, "tokens")) / passes : null;
  return { unix_s: now.unix_s, tokensPerS: produced / seconds, perPass, snapshot: now };
}

function Key({ asked, enter }) {
  const [text, type] = useState("");
  const submit = (event) => {
    event.preventDefault();
    enter(text.trim());
  };
  return html`<form class="key-form" onSubmit=${submit} id="key-form">
    <p role="alert">${asked}</p>
    <label>API key <input type="password" id="key" autocomplete="off" required value=${text} onInput=${(event) => type(event.target.value)} /></label>
    <button class="main">Use it</button>
    <p class="aside">It is kept in this tab only, and sent in a header.</p>
  </form>`;
}

function Connect() {
  const base = new URL("v1", document.baseURI).href;
  return html`<section aria-labelledby="connect"><h2 id="connect">Use it from your programs</h2>
    <p>This page is no chat client. Anything that speaks OpenAI's API can use the service at <code id="base">${base}</code>:</p>
    <dl>
      <dt>Open WebUI</dt><dd>Admin settings › Connections › OpenAI API: this address, and any key where the service has none.
        From a container: <code>host.docker.internal</code> instead of <code>127.0.0.1</code>, and <code>server.host: 0.0.0.0</code> with <code>api_keys</code>.</dd>
      <dt>Python</dt><dd><code>${`OpenAI(base_url="${base}", api_key="none")`}</code></dd>
      <dt>Others</dt><dd>LangChain, LlamaIndex, LiteLLM, editors: the address as base URL, the model's name from <a href="v1/models">/v1/models</a>.</dd>
    </dl></section>`;
}

function App() {
  const [now, setNow] = useState(null);
  const [history, setHistory] = useState([]);
  const [trouble, setTrouble] = useState(null);
  const [asked, ask] = useState(null);
  const [attempt, retry] = useState(0);
  const refused = () => ask(hasKey() ? "The service does not know this key." : "The service wants an API key.");

  useEffect(() => {
    const stopper = new AbortController();
    let timer;
    const watch = async () => {
      let before = null;
      try {
        for await (const snapshot of events("router/live", undefined, stopper.signal)) {
          if (snapshot.error) throw new Error(snapshot.error.message);
          const step = before && between(before, snapshot);
          before = snapshot;
          setNow(snapshot);
          setTrouble(null);
          ask(null);
          if (step) setHistory((kept) => [...kept.slice(1 - KEPT), step]);
        }
        throw new Error("the service has closed the connection");
      } catch (error) {
        if (stopper.signal.aborted) return;
        if (error.status === 401) return refused();
        setTrouble(`${error.message}; trying again`);
        timer = setTimeout(() => retry((count) => count + 1), error.status === 503 ? 5000 : 2000);
      }
    };
    watch();
    return () => {
      clearTimeout(timer);
      stopper.abort();
    };
  }, [attempt]);

  const enter = (key) => {
    setKey(key);
    retry((count) => count + 1);
  };
  const models = now?.models ?? [];
  const marks = useMemo(() => marksOf(models, now?.target), [models.map((one) => one.name).join()]);
  const past = history.find((one) => one.unix_s >= (now?.unix_s ?? 0) - RECENT)?.snapshot;
  const chains = (now?.decision?.predicted ?? []).map(([chain]) => chain).filter((chain) => chain.length > 1);
  const dtype = models.find((one) => one.name === now?.target)?.dtype;
  const last = history.at(-1);
  return html`<header>
      <h1>SpecRouter</h1>
      <p>${now
        ? html`serves <b id="target">${now.target}</b>: <b>${whole(last?.tokensPerS ?? 0)}</b> tokens/s, <b>${now.requests.running}</b> running,
          <b> ${now.requests.waiting}</b> waiting`
        : asked ? "" : "connecting…"}</p>
    </header>
    ${trouble && html`<p class="trouble" role="status">${trouble}</p>`}
    ${asked && html`<${Key} asked=${asked} enter=${enter} />`}
    ${now && html`
      <${Try} ...${{ marks, chains, chats: now.chats, dtype, refused }} />
      <section aria-labelledby="now"><h2 id="now">The decision of now</h2>
        <${Decision} now=${now} past=${past} marks=${marks} />
        <h3>How it changed, and why</h3><${Switches} now=${now} /></section>
      <div class="columns">
        <section aria-labelledby="speed"><h2 id="speed">Speed</h2><${Speed} history=${history} switches=${now.switches} /></section>
        <section aria-labelledby="strip"><h2 id="strip">The last cycles</h2>
          <${Cycles} cycles=${now.cycles} hasReplicas=${Object.keys(now.replicas).length > 0} /></section>
      </div>
      <section aria-labelledby="models-title"><h2 id="models-title">Models</h2><${Models} now=${now} marks=${marks} /></section>
      <section aria-labelledby="requests"><h2 id="requests">Requests and memory</h2><${Requests} now=${now} /></section>`}
    <${Connect} />`;
}

render(html`<${App} />`, document.getElementById("app"));
