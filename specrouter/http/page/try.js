// The prompt box: tokens coloured by who proposed them, the same seed without speculation beside
// them, and the tree of each cycle. Texts are put in as text, never as markup.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.js";
import { ask, events } from "./net.js";
import { chainText, mark, percent } from "./words.js";

const EDIT = `Rename the function total to sum_of_squares. Answer with the whole code.

def total(values):
    result = 0
    for value in values:
        result += value * value
    return result

def mean(values):
    return total(values) / len(values)`;
// What may be asked for at a click: of a model that chats, and of one that goes on with a text.
const EXAMPLES = [
  ["Edit code", EDIT, "def fib(n):\n"],
  ["JSON", "List three countries of Europe with their capitals, as JSON.", '[{"country": "France", "capital": "Paris"}, {"country":'],
  ["Prose", "Why is the sky blue? Answer in three sentences.", "The sea was calm that morning, and"],
];
const FIRST = { prompt: EXAMPLES[0][2], tokens: 64, temperature: 0, seed: 1, chain: "", isChat: false };
const REDRAW_MS = 50; // long texts are many elements
const EMPTY = { tokens: [], cycles: [], metrics: null, error: null, state: "idle" };

/** One request. Calls `show` with all that has come so far. */
async function generate(form, speculation, show, signal) {
  const made = { ...EMPTY, tokens: [], cycles: [], state: "running" };
  show({ ...made });
  let shown = 0;
  try {
    const messages = [{ role: "user", content: form.prompt }];
    const body = {
      prompt: form.isChat ? (await ask("tokenize", { messages }, signal)).tokens : form.prompt,
      max_new_tokens: Number(form.tokens),
      temperature: Number(form.temperature),
      seed: Number(form.seed),
      logprobs: 0,
      return_drafts: true,
      prefix_cache: false,
      stream: true,
      speculation,
    };
    for await (const event of events("generate", body, signal)) {
      if (event.error) throw new Error(event.error.message);
      take(made, event);
      if (performance.now() - shown < REDRAW_MS) continue;
      shown = performance.now();
      show({ ...made, tokens: [...made.tokens], cycles: [...made.cycles] });
    }
    made.state = "done";
  } catch (error) {
    if (signal.aborted) made.state = "stopped";
    else Object.assign(made, { state: "failed", error: error.message, status: error.status });
  }
  show({ ...made });
  return made;
}

function take(made, event) {
  const draft = event.draft;
  const cycle = made.cycles.length;
  if (draft) made.cycles.push(draft);
  (event.token_ids ?? []).forEach((id, place) => {
    const node = draft.tree.accepted[place];
    made.tokens.push({
      id,
      text: draft.texts[place],
      by: draft.proposed_by[place],
      drafted: node === undefined ? null : draft.tree.probabilities[node],
      target: Math.exp(event.logprobs[place].logprob),
      chain: draft.chain,
      cycle,
    });
  });
  if (event.metrics) made.metrics = event.metrics;
}

/** The place of the first token that differs, or null. Of texts that still come, what is there. */
function firstDifference(routed, alone) {
  const both = Math.min(routed.tokens.length, alone.tokens.length);
  for (let place = 0; place < both; place++)
    if (routed.tokens[place].id !== alone.tokens[place].id) return place;
  const ended = routed.state === "done" && alone.state === "done";
  return ended && routed.tokens.length !== alone.tokens.length ? both : null;
}

function Verdict({ routed, alone, dtype }) {
  if (alone.state !== "done" || routed.state !== "done") return null;
  const place = firstDifference(routed, alone);
  const rounds = dtype && dtype !== "float64";
  return html`<p class=${`verdict ${place === null ? "equal" : "differs"}`} role="status" id="verdict">
    ${place === null
      ? html`<b>✓ Equal.</b> All ${routed.tokens.length} tokens are those of the target alone.`
      : html`<b>✗ Differs</b> from token ${place + 1} on.`}
    ${rounds &&
    html` <span class="aside">The target computes in ${dtype}, where rounding may decide between nearly
      equal tokens: <a href="#guarantees">what is guaranteed</a>.</span>`}
  </p>`;
}

function Tokens({ made, marks, label, differs, chosen, shown, choose }) {
  const box = useRef(null);
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !made.tokens.length) return;
    event.preventDefault();
    const last = made.tokens.length - 1;
    choose(Math.max(0, Math.min(last, (chosen ?? (step > 0 ? -1 : last + 1)) + step)));
  };
  const at = (event) => {
    const place = event.target.dataset?.place;
    if (place !== undefined) choose(Number(place));
  };
  return html`<div
    class="tokens" ref=${box} tabindex="0" role="group" aria-label=${label}
    onKeyDown=${move} onMouseOver=${at} onClick=${at}
  >${made.tokens.map(
      (token, place) =>
        html`<span
          key=${place}
          class=${[
            "token", marks.get(token.by) ?? "mark-0", token.text === "" && "empty",
            differs !== null && place >= differs && "other", place === shown && "chosen",
          ].filter(Boolean).join(" ")}
          data-place=${place}
        >${token.text}</span>`,
    )}${made.state === "running" && html`<span class="caret" aria-hidden="true"></span>`}</div>`;
}

function Shares({ made, marks }) {
  const counts = new Map();
  for (const token of made.tokens) counts.set(token.by, (counts.get(token.by) ?? 0) + 1);
  return html`<ul class="shares" aria-label="Who proposed the tokens">
    ${[...counts].map(
      ([name, count]) => html`<li key=${name}>
        <span class=${`token ${marks.get(name)}`}>${name}</span> ${count}
        <span class="aside"> (${percent(count / made.tokens.length)})</span>
      </li>`,
    )}
  </ul>`;
}

function Figures({ made, speeds }) {
  const metrics = made.metrics;
  if (!metrics) return html`<p class="figures aside">${made.state === "running" ? "…" : " "}</p>`;
  const speed = speeds.length ? median(speeds) : metrics.tpot_ms && 1000 / metrics.tpot_ms;
  return html`<p class="figures">
    <b>${speed ? speed.toFixed(1) : "–"}</b> tokens/s
    <span> · <b>${metrics.acceptance_length.toFixed(2)}</b> tokens per pass</span>
  </p>`;
}

const RANKS = { 8: 0, 16: 2, 32: 8 }; // by pairs: of the values between which the median lies, but in one case of 128
const [PAIRS, MOST_PAIRS] = [8, 32];
const LONG_MS = 20_000; // after which no more pairs than the next number of them are measured

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

/** Two of the ratios, between which their true median lies; null before there are enough. */
function interval(ratios) {
  const rank = RANKS[ratios.length];
  const sorted = [...ratios].sort((a, b) => a - b);
  return rank === undefined ? null : [sorted[rank], sorted.at(-1 - rank)];
}

const isDecided = (ratios, isLate) => {
  const found = interval(ratios);
  return found !== null && (isLate || ratios.length === MOST_PAIRS || found[0] > 1 || found[1] < 1);
};

/** How fast it was, measured in turns. */
function Speedup({ ratios, drafted, isMeasuring, stop }) {
  const found = isDecided(ratios, !isMeasuring) ? interval(ratios) : null;
  if (found === null)
    return isMeasuring && html`<p class="aside" id="speedup">Measuring both in turns: pair ${ratios.length + 1} of ${PAIRS} to ${MOST_PAIRS}…
      <button type="button" onClick=${stop}>Stop</button></p>`;
  const [low, high] = found;
  const spread = `${low.toFixed(2)} to ${high.toFixed(2)}, ${ratios.length} pairs in turns`;
  return html`<p class="verdict equal" id="speedup">${low <= 1 && high >= 1
    ? html`<b>No difference in speed measurable</b> (${spread}).`
    : html`<b>${median(ratios).toFixed(2)}× ${median(ratios) > 1 ? "faster" : "the speed"}</b> with drafts (${spread}).`}
    ${!drafted && " Nothing was drafted."}</p>`;
}

function Detail({ token, place }) {
  if (!token)
    return html`<output class="detail aside">Point at a token, or use the arrow keys, to see who proposed it.</output>`;
  const shown = JSON.stringify(token.text);
  return html`<output class="detail">
    Token ${place + 1}, <code>${shown}</code>: ${token.drafted === null
      ? html`chosen by the target <b>${token.by}</b>`
      : html`proposed by <b>${token.by}</b> (${percent(token.drafted)})`};
    the target's probability ${percent(token.target)}; chain ${chainText(token.chain)}; cycle ${token.cycle + 1}.
  </output>`;
}

const [WIDE, HIGH] = [118, 34]; // of a node's place

/** Columns by depth; the accepted path comes first, so it runs along the top. */
function placed(tree) {
  const accepted = new Set(tree.accepted);
  const children = new Map();
  tree.parents.forEach((parent, node) => {
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  });
  const spots = [];
  let row = 0;
  const visit = (node, depth) => {
    if (node >= 0) spots[node] = { x: depth, y: row };
    const below = [...(children.get(node) ?? [])].sort((a, b) => accepted.has(b) - accepted.has(a));
    below.forEach((child, index) => {
      if (index) row += 1;
      visit(child, depth + 1);
    });
  };
  visit(-1, 0);
  const columns = 1 + Math.max(0, ...spots.map((spot) => spot.x));
  return { spots, accepted, columns, rows: row + 1 };
}

const short = (text) => (text.length > 12 ? `${text.slice(0, 11)}…` : text).replace(/\s/g, (c) => (c === " " ? "␣" : "⏎"));

function Tree({ draft, own, cycle, cycles, go, marks }) {
  const { spots, accepted, columns, rows } = placed(draft.tree);
  const last = draft.tree.accepted.at(-1);
  const end = last === undefined ? { x: 0, y: 0 } : spots[last];
  const middle = (spot) => [spot.x * WIDE + 8, spot.y * HIGH + 22];
  const [width, height] = [(columns + 1) * WIDE, rows * HIGH + 12];
  const line = (from, to, isOn) => {
    const [[x1, y1], [x2, y2]] = [middle(from), middle(to)];
    return html`<path class=${isOn ? "edge on" : "edge"} d=${`M${x1 + 98},${y1} C${x1 + 112},${y1} ${x2 - 16},${y2} ${x2},${y2}`} />`;
  };
  const root = { x: 0, y: 0 };
  const box = (spot, text, look, title) => {
    const [x, y] = middle(spot);
    return html`<g class=${look}><title>${title}</title><rect x=${x} y=${y - 13} width="98" height="26" rx="5" />
      <text x=${x + 49} y=${y + 4.5}>${short(text)}</text></g>`;
  };
  const said = `Cycle ${cycle + 1}: ${draft.tree.parents.length} nodes were verified, ${draft.tree.accepted.length} accepted.`;
  return html`<div class="tree">
    <p><button type="button" onClick=${() => go(cycle - 1)} disabled=${cycle === 0} aria-label="Cycle before">←</button>
      <button type="button" onClick=${() => go(cycle + 1)} disabled=${cycle === cycles - 1} aria-label="Next cycle">→</button>
      <b> Cycle ${cycle + 1} of ${cycles}</b>, ${chainText(draft.chain)}:
      ${draft.tree.parents.length
        ? ` ${draft.tree.accepted.length} of ${draft.tree.parents.length} drafted tokens accepted, then the target's own`
        : " nothing was drafted"}</p>
    <div class="scroll" tabindex="0" role="group" aria-label="Drafted tree">
      <svg width=${width} height=${height} role="img" aria-label=${said}>
        ${draft.tree.parents.map((parent, node) => line(parent < 0 ? root : spots[parent], spots[node], accepted.has(node)))}
        ${line(end, { x: end.x + 1, y: end.y }, true)}
        ${box(root, "…text", "node root", "The text so far")}
        ${draft.tree.parents.map((_, node) =>
          box(
            spots[node], draft.tree.texts[node] ?? "…",
            `node ${marks.get(draft.tree.proposed_by[node])} ${accepted.has(node) ? "on" : "off"}`,
            `${draft.tree.proposed_by[node]}, ${draft.tree.texts[node] === null ? "a quotation of another output" : percent(draft.tree.probabilities[node])}, ${accepted.has(node) ? "accepted" : "not accepted"}`,
          ),
        )}
        ${box({ x: end.x + 1, y: end.y }, own ?? "", `node ${mark(0)} on`, "The target's own token")}
      </svg>
    </div>
  </div>`;
}

function Field({ label, ...attributes }) {
  return html`<label>${label}<input type="number" required ...${attributes} /></label>`;
}

function Form({ form, change, chains, chats, run, stop, isRunning }) {
  const set = (name) => (event) => change({ ...form, [name]: event.target.value });
  const submit = (event) => {
    event.preventDefault();
    run(form);
  };
  const enter = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  };
  return html`<form onSubmit=${submit} class="prompt">
    <p class="examples">Try ${EXAMPLES.map(([name, message, text]) => html`<button type="button"
        onClick=${() => change({ ...form, prompt: form.isChat ? message : text })}>${name}</button> `)}</p>
    <label class="wide">Prompt
      <textarea id="prompt" rows="3" required value=${form.prompt} onInput=${set("prompt")} onKeyDown=${enter}></textarea></label>
    <div class="row">
      <${Field} label="Tokens" id="tokens" min="1" max="1024" value=${form.tokens} onInput=${set("tokens")} />
      <${Field} label="Temperature" min="0" max="5" step="0.1" value=${form.temperature} onInput=${set("temperature")} />
      <${Field} label="Seed" id="seed" min="0" max=${2 ** 53 - 1} value=${form.seed} onInput=${set("seed")} />
      ${chats && html`<label>As a chat message
        <input type="checkbox" id="chat" checked=${form.isChat} onChange=${(event) => change({ ...form, isChat: event.target.checked })} /></label>`}
      <label>Chain
        <select id="chain" value=${form.chain} onChange=${set("chain")}>
          <option value="">the router decides</option>
          ${chains.map((chain) => html`<option value=${chain.join(">")}>${chainText(chain)}</option>`)}
        </select></label>
      ${isRunning
        ? html`<button type="button" onClick=${stop}>Stop</button>`
        : html`<button class="main" id="run">Generate <kbd>Ctrl ↵</kbd></button>`}
    </div>
  </form>`;
}

export function Try({ marks, chains, chats, dtype, refused }) {
  const [form, change] = useState(chats ? { ...FIRST, prompt: EDIT, tokens: 128, isChat: true } : FIRST);
  const [routed, showRouted] = useState(EMPTY);
  const [alone, showAlone] = useState(EMPTY);
  const [chosen, choose] = useState(null);
  const stopper = useRef(null);
  const [timed, measure] = useState([]);
  const [isMeasuring, setMeasuring] = useState(false);
  const isRunning = routed.state === "running" || alone.state === "running";
  useEffect(() => () => stopper.current?.abort(), []);

  const run = async (asked) => {
    change(asked);
    choose(null);
    stopper.current?.abort(); // what is still being measured
    stopper.current = new AbortController();
    const { signal } = stopper.current;
    showAlone(EMPTY);
    setMeasuring(false);
    measure([]);
    const speculation = { reuse_outputs: false, ...(asked.chain && { chain: asked.chain.split(">") }) };
    const isLast = () => stopper.current.signal === signal; // else its panes are another run's
    const shown = (show) => (made) => isLast() && show(made);
    const ways = [[speculation, shown(showRouted)], ["off", shown(showAlone)]];
    const made = [];
    for (const [way, show] of ways) { // shown as it comes, and not timed
      made.push(await generate(asked, way, show, signal));
      if (made.at(-1).status === 401) refused(made.at(-1).error);
      if (made.at(-1).state !== "done") return;
    }
    if (firstDifference(...made) !== null) return;
    const timed = [];
    setMeasuring(true);
    const began = performance.now();
    while (!isDecided(timed.map(([a, b]) => a / b), performance.now() - began > LONG_MS)) {
      const speeds = [];
      const first = Math.random() < 0.5 ? 0 : 1; // so that whatever else the machine does favours neither
      for (const which of [first, 1 - first]) {
        const made = await generate(asked, ways[which][0], () => {}, signal);
        if (!isLast()) return;
        if (made.state !== "done" || !made.metrics.tpot_ms) return setMeasuring(false);
        speeds[which] = 1000 / made.metrics.tpot_ms;
      }
      timed.push(speeds);
      measure([...timed]);
    }
    setMeasuring(false);
  };
  const ratios = timed.map(([a, b]) => a / b);
  const differs = routed.state === "idle" ? null : firstDifference(routed, alone);
  // Until one is chosen, the first drafted token of the largest tree.
  const largest = Math.max(...routed.cycles.map((one) => one.tree.parents.length));
  const place = chosen ?? routed.tokens.findIndex(
    (one) => one.drafted !== null && routed.cycles[one.cycle].tree.parents.length === largest,
  );
  const token = routed.tokens[place];
  const cycle = token ? token.cycle : 0;
  const draft = routed.cycles[cycle];
  const go = (to) => choose(routed.tokens.findIndex((one) => one.cycle === to));
  const drafted = routed.tokens.some((one) => one.drafted !== null);
  const failed = routed.error ?? alone.error;
  return html`<section aria-labelledby="try" class="try">
    <h2 id="try">Try it</h2>
    <p>A small model, or what was written before, guesses the next words; the big model checks all guesses at once. Coloured words
      were guessed right. The text is exactly what the big model alone would write.</p>
    <${Form} ...${{ form, change, chains, chats, run, isRunning }} stop=${() => stopper.current.abort()} />
    ${failed && html`<p role="alert" class="verdict differs">${failed}</p>`}
    ${routed.state !== "idle" &&
    html`<${Verdict} ...${{ routed, alone, dtype }} />
      <${Speedup} ...${{ ratios, drafted, isMeasuring }} stop=${() => stopper.current.abort()} />
      <div class="panes">
        <div class="pane" id="routed"><h3>With drafts</h3>
          <${Figures} made=${routed} speeds=${timed.map(([speed]) => speed)} />
          <${Tokens} made=${routed} label="Tokens, by who proposed them" ...${{ marks, differs, chosen, choose }} shown=${place} />
          <${Shares} made=${routed} marks=${marks} /></div>
        <div class="pane" id="alone"><h3>Without, same seed</h3>
          <${Figures} made=${alone} speeds=${timed.map(([, speed]) => speed)} />
          <${Tokens} made=${alone} label="Tokens without speculation" ...${{ marks, differs, chosen, choose }} shown=${place} /></div>
      </div>
      ${routed.state === "done" && !drafted && chains.length > 0 &&
      html`<p class="hint">Nothing was drafted: either the router predicts that here the target alone is quicker, or no drafter could.
        <button type="button" onClick=${() => run({ ...form, chain: chains[0].join(">") })}>
          Draft with ${chains[0][0]} all the same</button></p>`}
      <${Detail} token=${token} place=${place} />
      ${draft && html`<${Tree} draft=${draft} own=${draft.texts[draft.tree.accepted.length]} cycles=${routed.cycles.length}
        ...${{ cycle, go, marks }} />`}`}
  </section>`;
}
