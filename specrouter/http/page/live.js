// What the service sends once a second: the decision of now, speeds, cycles, models, requests.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.js";
import { bytes, chainText, clock, ms, percent, whole } from "./words.js";

const same = (a, b) => a.join(">") === b.join(">");

/** Of a chain: what its tokens took of late, or since the start; tokens per pass likewise. */
function measured(chain, now, past) {
  const find = (sample) => sample?.chains.find((one) => same(one.chain, chain));
  const total = find(now);
  if (!total) return null;
  const before = find(past) ?? { cycles: 0, tokens: 0, between_s: 0, timed_tokens: 0 };
  const enough = total.timed_tokens - before.timed_tokens >= 8;
  const from = enough ? before : { cycles: 0, tokens: 0, between_s: 0, timed_tokens: 0 };
  const timed = total.timed_tokens - from.timed_tokens;
  return {
    ms: timed ? (1000 * (total.between_s - from.between_s)) / timed : null,
    length: total.cycles > from.cycles ? (total.tokens - from.tokens) / (total.cycles - from.cycles) : null,
  };
}

export function Decision({ now, past, marks }) {
  const decision = now.decision;
  if (!decision) return html`<p class="aside">Nothing has been decided yet.</p>`;
  const predicted = new Map(decision.predicted.map(([chain, value]) => [chain.join(">"), value]));
  const known = [...decision.predicted.map(([chain]) => chain), ...now.chains.map((one) => one.chain)];
  if (!predicted.has(decision.chain.join(">"))) known.push(decision.chain);
  const chains = known.filter((chain, place) => known.findIndex((other) => same(chain, other)) === place);
  const rows = chains.slice(0, 9).map((chain) => ({
    chain,
    predicted: predicted.get(chain.join(">")) ?? null,
    ...(measured(chain, now, past) ?? { ms: null, length: null }),
  }));
  const alone = rows.find((one) => one.chain.length === 1);
  const most = Math.max(...rows.flatMap((one) => [one.predicted ?? 0, one.ms ?? 0]), 0.001);
  const shape = decision.depth && decision.chain.length > 1 ? `, trees of depth ${decision.depth}, width ${decision.width}` : "";
  return html`<p>In use: <b>${chainText(decision.chain)}</b>${shape}: ${decision.reason}
      <span class="aside"> (policy ${now.policy.scheduler}).</span></p>
    <${Speedups} now=${now} />
    <div class="scroll" tabindex="0" role="group" aria-label="Chains"><table class="chains" id="decision">
      <thead><tr><th scope="col">Chain</th><th scope="col">Milliseconds per token</th><th scope="col">predicted</th>
        <th scope="col">measured</th><th scope="col">tokens per pass</th><th scope="col">predicted speedup</th></tr></thead>
      <tbody>${rows.map((row) => {
        const isUsed = same(row.chain, decision.chain);
        return html`<tr key=${row.chain.join(">")} class=${isUsed ? "used" : ""}>
          <th scope="row">${isUsed ? "▶ " : ""}${row.chain.map(
            (name, place) => html`${place > 0 && " › "}<span class=${`token ${marks.get(name)}`}>${name}</span>`,
          )}${isUsed && html`<span class="aside"> in use</span>`}</th>
          <td class="bar"><svg viewBox="0 0 100 20" preserveAspectRatio="none" aria-hidden="true">
            <rect class="predicted" x="0" y="3" width=${(100 * (row.predicted ?? 0)) / most} height="8" />
            <rect class="measured" x="0" y="13" width=${(100 * (row.ms ?? 0)) / most} height="4" /></svg></td>
          <td>${ms(row.predicted)}</td><td>${ms(row.ms)}</td>
          <td>${row.length ? row.length.toFixed(2) : "–"}</td>
          <td>${row.predicted && alone?.predicted ? `${(alone.predicted / row.predicted).toFixed(2)}×` : "–"}</td></tr>`;
      })}</tbody></table></div>
    <p class="aside key"><span class="swatch predicted"></span> predicted for the requests of now: the router decides by it.
      <span class="swatch measured"></span> measured over the last minutes, of whatever requests there were. Less is better.</p>`;
}

const times = (one) => `${one.ratio.toFixed(2)}× (${one.low.toFixed(2)} to ${one.high.toFixed(2)})`;

/** What drafts were measured to bring, by load. */
function Speedups({ now }) {
  if (!now.speedups.length)
    return now.policy.scheduler === "adaptive" && html`<p class="aside" id="speedups">How much faster requests are with drafts has not been measured yet: one cycle in a hundred
      runs without them, which takes thousands of cycles that draft.</p>`;
  return html`<p id="speedups">Measured while serving, with drafts over without: ${now.speedups.map((one) =>
    html`<b>${one.is_resting ? `off at ${one.requests}` : `${times(one)} at ${one.requests}`}</b>${one.is_resting && ` (${times(one)})`}. `)}</p>`;
}

export function Switches({ now }) {
  const [isWhole, setWhole] = useState(false);
  const list = [...now.switches].reverse();
  if (!list.length) return html`<p class="aside">No switch yet: the first request makes the first decision.</p>`;
  const shape = (one) => (one.chain.length > 1 ? ` depth ${one.depth}, width ${one.width},` : "");
  return html`<ul class="switches">
      ${list.slice(0, isWhole ? 24 : 5).map((one) => html`<li>
        <time>${clock(one.unix_s)}</time> <b>${chainText(one.chain)}</b>${shape(one)}
        ${` for ${one.requests} request${one.requests === 1 ? "" : "s"}: ${one.reason}`}</li>`)}
    </ul>
    ${list.length > 5 && html`<button type="button" onClick=${() => setWhole(!isWhole)}>${isWhole ? "Fewer" : `All ${list.length}`}</button>`}`;
}

/** A colour of the style sheet as a canvas takes it, for light or dark. */
function colour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Tokens/s of all requests, and tokens per pass of the target. */
export function Speed({ history, switches }) {
  const box = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, font: "12px system-ui" };
    const made = new uPlot(
      {
        width: box.current.clientWidth, height: 170, legend: { show: false }, cursor: { show: false },
        scales: { y: { range: (_, __, most) => [0, Math.max(1, most * 1.1)] }, passes: { range: (_, __, most) => [0, Math.max(2, most * 1.1)] } },
        axes: [axis, { ...axis, size: 44 }, { ...axis, side: 1, scale: "passes", grid: { show: false }, size: 36 }],
        series: [
          {},
          { stroke: colour("--accent"), fill: colour("--wash"), width: 2 },
          { stroke: colour("--text"), width: 1.5, dash: [5, 4], scale: "passes" },
        ],
        hooks: { draw: [(drawn) => drawn.switchTimes?.forEach((unixS) => {
          const x = drawn.valToPos(unixS, "x", true);
          if (x < drawn.bbox.left) return;
          drawn.ctx.strokeStyle = colour("--soft");
          drawn.ctx.beginPath();
          drawn.ctx.moveTo(x, drawn.bbox.top);
          drawn.ctx.lineTo(x, drawn.bbox.top + drawn.bbox.height);
          drawn.ctx.stroke();
        })] },
      },
      [[], [], []], box.current,
    );
    plot.current = made;
    const fit = new ResizeObserver(() => made.setSize({ width: box.current.clientWidth, height: 170 }));
    fit.observe(box.current);
    return () => { fit.disconnect(); made.destroy(); };
  }, []);
  useEffect(() => {
    plot.current.switchTimes = switches.map((one) => one.unix_s);
    plot.current.setData([
      history.map((one) => one.unix_s), history.map((one) => one.tokensPerS), history.map((one) => one.perPass),
    ]);
  }, [history]);
  const last = history.at(-1);
  const said = last ? `${last.tokensPerS.toFixed(0)} tokens per second now` : "no figures yet";
  return html`<div class="plot" ref=${box} role="img" aria-label=${`Speed over the last minutes: ${said}`}></div>
    <p class="aside key"><span class="swatch line"></span> tokens/s of all requests (left)
      <span class="swatch dash"></span> tokens per pass of the target (right); upright: a switch of chain or tree</p>`;
}

const PARTS = [["verify_ms", "verify"], ["rescore_ms", "re-score"], ["draft_ms", "draft"], ["own_ms", "own work"]];

/** The last cycles, one column each, as high as they took long. */
export function Cycles({ cycles, hasReplicas }) {
  if (!cycles.length)
    return html`<p class="aside">${hasReplicas ? "Replicas do not report single cycles." : "No cycle has run yet."}</p>`;
  const parts = cycles.map(([chain, elapsed_ms, draft_ms, rescore_ms, verify_ms, requests, tokens]) => ({
    chain, elapsed_ms, draft_ms, rescore_ms, verify_ms, requests, tokens,
    own_ms: Math.max(0, elapsed_ms - draft_ms - rescore_ms - verify_ms),
  }));
  const most = Math.max(...parts.map((one) => one.elapsed_ms));
  const sum = (name) => parts.reduce((total, one) => total + one[name], 0);
  const all = sum("elapsed_ms");
  return html`<svg class="cycles" viewBox=${`0 0 ${parts.length * 10} 100`} preserveAspectRatio="none" role="img" id="cycles"
      aria-label=${`The last ${parts.length} cycles: ${PARTS.map(([name, word]) => `${word} ${percent(sum(name) / all)}`).join(", ")}`}>
      <defs><pattern id="stripes" width="3" height="3" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="ground" width="3" height="3" /><rect class="ink" width="1.2" height="3" /></pattern>
        <pattern id="dots" width="3" height="3" patternUnits="userSpaceOnUse"><rect class="ground" width="3" height="3" /><circle class="ink" cx="1.5" cy="1.5" r=".8" /></pattern></defs>
      ${parts.map((one, place) => {
        let top = 100;
        return PARTS.map(([name]) => {
          const height = (98 * one[name]) / most;
          top -= height;
          return html`<rect class=${name} x=${place * 10 + 1} y=${top} width="8" height=${height}><title>${chainText(one.chain)}: ${ms(one.elapsed_ms)}, ${one.tokens} tokens for ${one.requests} requests</title></rect>`;
        });
      })}</svg>
    <p class="aside key">${[...PARTS].reverse().map(([name, word]) => html`<span class=${`swatch ${name}`}></span> ${word} ${percent(sum(name) / all)} `)}
      of ${ms(all / parts.length)} a cycle; the highest ${ms(most)}</p>`;
}

export function Models({ now, marks }) {
  const at = (times, n) => times.find(([tokens]) => tokens === n)?.[1];
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Models"><table id="models">
    <thead><tr><th scope="col">Model</th><th scope="col">State</th><th scope="col">Device</th><th scope="col">Weights + KV</th>
      <th scope="col">T(1)</th><th scope="col">T(8)</th><th scope="col">T(64)</th></tr></thead>
    <tbody>${now.models.map((one) => html`<tr key=${one.name}>
      <th scope="row"><span class=${`token ${marks.get(one.name)}`}>${one.name}</span>${one.name === now.target && html`<span class="aside"> target</span>`}</th>
      <td>${one.state}</td>
      <td>${one.device ? `${one.device}, ${one.dtype}${one.weights === "plain" ? "" : `, ${one.weights}`}` : "no weights"}</td>
      <td>${one.device ? `${bytes(one.weight_bytes)} + ${bytes(one.kv_bytes)}` : "–"}</td>
      ${[1, 8, 64].map((n) => html`<td>${ms(at(one.times, n))}</td>`)}</tr>`)}</tbody></table></div>
    <p class="aside">T(n): a forward pass over n tokens, on the machine as it is now.</p>`;
}

export function Requests({ now }) {
  const { requests, cache, objectives } = now;
  const classes = Object.entries(objectives).filter(([, [, judged]]) => judged);
  const replicas = Object.entries(now.replicas);
  return html`<dl class="facts">
    <div><dt>Running, waiting</dt><dd><b>${requests.running}</b> of ${requests.rows} rows, <b>${requests.waiting}</b> wait</dd></div>
    <div><dt>KV memory</dt><dd>${percent(cache.kv_reserved_tokens / Math.max(1, cache.kv_capacity_tokens))} of ${whole(cache.kv_capacity_tokens)} tokens</dd></div>
    <div><dt>Prefix cache</dt><dd>${cache.lookup_tokens ? percent(cache.cached_tokens / cache.lookup_tokens) : "–"} of prompt tokens found, ${whole(cache.kv_cached_tokens)} kept</dd></div>
    <div><dt>Drafted tokens</dt><dd>${now.totals.drafted_tokens ? percent(now.totals.accepted_tokens / now.totals.drafted_tokens) : "–"} of ${whole(now.totals.drafted_tokens)} accepted</dd></div>
    <div><dt>Objectives attained</dt><dd>${classes.length
      ? classes.map(([name, [attained, judged]]) => html`<span class="class">${name}: ${attained} of ${judged} (${percent(attained / judged)}) </span>`)
      : "no request with one has ended"}</dd></div>
    <div><dt>Replicas</dt><dd>${replicas.length ? replicas.map(([name, doing]) => html`<span class="class">${name}: ${doing} </span>`) : "one engine, in this process"}
      ${now.pairs.length > 0 && html`<span class="class">pairs: ${now.pairs.join(", ")}</span>`}</dd></div>
  </dl>`;
}
