// What the server says of itself, as figures that move.

const at = (id) => document.getElementById(id);
const KEPT = 120; // seconds of the curve
const STEADY = 5; // seconds that a rate is the mean of
let before = []; // [time, tokens drawn, prompt tokens computed]

// From Prometheus' text to numbers by name and labels
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const [, name, labels, value] = line.match(/^(\w+)(?:\{(.*)\})? (\S+)/) ?? [];
    if (name) found.set(labels ? `${name}{${labels}}` : name, Number(value));
    if (name === "jkvq_served_info") {
      found.about = Object.fromEntries([...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((m) => [m[1], m[2]]));
    }
  }
  return found;
}

export function show(figures, now) {
  const of = (name) => figures.get(`jkvq_${name}`) ?? 0;
  const { model, cache } = figures.about ?? {};
  at("what").textContent = `${model} with ${cache}`;
  document.title = `${model} · jkvq`;
  rates(now, of("drawn_tokens_total"), of("prefilled_tokens_total"));
  filled("batch", of("running"), of("slots"));
  at("waiting").textContent = `${of("waiting")} waiting`;
  for (const pool of ["packed", "exact"]) {
    filled(pool, of(`pages_used{pool="${pool}"}`), of(`pages{pool="${pool}"}`));
  }
  if (!of('pages{pool="exact"}')) at("exact-note").textContent = "this cache has none beside the others";
  memory(of("used_bytes"), of("bf16_bytes"), of("pool_bytes"));
  const stored = of("cached_tokens_total");
  const prompts = stored + of("prefilled_tokens_total");
  at("hits").textContent = prompts ? percent(stored / prompts) : "–";
  at("hits-meter").value = prompts ? stored / prompts : 0;
  at("hits-note").textContent = `${count(stored)} of ${count(prompts)} tokens of prompts`;
  at("first").textContent = mean(figures, "time_to_first_token_seconds");
  at("next").textContent = `then ${mean(figures, "time_per_token_seconds")} a token, in the mean`;
  at("preempted").textContent = count(of("preemptions_total"));
  at("evicted").textContent = `texts began again; ${count(of("evictions_total"))} stored prompts went`;
  guard(figures);
}

function rates(now, drawn, read) {
  before = [...before.filter(([time]) => now - time <= KEPT), [now, drawn, read]];
  const recent = before.findLast(([time]) => now - time >= STEADY) ?? before[0];
  const past = now - recent[0];
  at("rate").textContent = past ? number((drawn - recent[1]) / past) : "–";
  at("read").textContent = past ? `and ${number((read - recent[2]) / past)} of prompts` : "";
  const steps = before.slice(1).map(([time, tokens], i) => [time, (tokens - before[i][1]) / (time - before[i][0])]);
  const most = Math.max(1, ...steps.map(([, rate]) => rate));
  const points = steps.map(([time, rate]) => `${KEPT - (now - time)},${29 - 28 * rate / most}`);
  at("rates").firstElementChild.setAttribute("points", points.join(" "));
}

function filled(id, used, all) {
  at(id).textContent = `${count(used)} of ${count(all)}`;
  at(`${id}-meter`).max = Math.max(all, 1);
  at(`${id}-meter`).value = used;
}

function memory(used, plain, pool) {
  at("memory").textContent = used ? `${(plain / used).toFixed(1)} × less` : "–";
  const most = Math.max(used, plain, 1);
  for (const [id, value] of [["ours", used], ["plain", plain]]) {
    at(id).style.width = `${100 * value / most}%`;
    at(`${id}-size`).textContent = bytes(value);
  }
  at("pool").textContent = `pools of ${bytes(pool)} in all`;
}

function guard(figures) {
  const checked = figures.get("jkvq_guard_texts_total");
  at("guard").hidden = checked === undefined;
  if (checked === undefined) return;
  const kl = figures.get("jkvq_guard_kl_sum") / figures.get("jkvq_guard_kl_count");
  at("kl").textContent = checked ? `KL ${kl.toPrecision(2)} nats` : "waits for an idle moment";
  const other = figures.get("jkvq_guard_diverged_total");
  const warnings = figures.get("jkvq_guard_warnings_total");
  const before = figures.get("jkvq_guard_tokens_before_divergence_sum") / other;
  at("guard-note").textContent = `${count(checked)} texts were run again. In ${count(other)} of them ` +
    "16 bits would have made another token the likeliest" + (other ? `, after ${before.toFixed(0)} in the mean.` : ".") +
    (warnings ? ` ${count(warnings)} warnings: see the log.` : "");
}

function mean(figures, name) {
  const count = figures.get(`jkvq_${name}_count`);
  if (!count) return "–";
  const seconds = figures.get(`jkvq_${name}_sum`) / count;
  return seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`;
}

const count = (value) => value.toLocaleString("en");
const number = (value) => value.toFixed(value < 100 ? 1 : 0);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

function bytes(value) {
  const step = value < 1 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${step ? (value / 1000 ** step).toPrecision(3) : value} ${["B", "KB", "MB", "GB", "TB"][step]}`;
}
