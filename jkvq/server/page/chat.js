// A question to the server, whose answer comes in pieces.

// Calls `onText` with every piece; returns a line about the whole.
export async function ask(request, messages, options, signal, onText) {
  const start = performance.now();
  const answer = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ messages, ...options, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!answer.ok) throw new Error(await sentence(answer));
  let first = null;
  let usage = null;
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices?.[0]?.delta?.content;
    if (piece) {
      first ??= performance.now();
      onText(piece);
    }
    usage = event.usage ?? usage;
  }
  return summary(usage, start, first ?? performance.now(), performance.now());
}

async function sentence(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

function summary(usage, start, first, end) {
  if (!usage) return "";
  const tokens = usage.completion_tokens;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [`${tokens} tokens`, `first after ${seconds(first - start)}`];
  if (tokens > 1 && end > first) parts.push(`${((tokens - 1) / (end - first) * 1000).toFixed(1)} per second`);
  parts.push(`prompt ${usage.prompt_tokens}, ${cached} of them stored before`);
  return parts.join(" · ");
}

const seconds = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);
