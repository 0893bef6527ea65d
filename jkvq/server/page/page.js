// The page: a chat over /v1/chat/completions, and what /metrics says once a second.
import { ask } from "./chat.js";
import { parse, show } from "./watch.js";

const at = (id) => document.getElementById(id);
const KEY = "jkvq-key";
let messages = [];
let going = null; // the AbortController of the answer that is being written

// Requests carry the key; who has none or a wrong one is asked, and tries again
async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.status !== 401) return answer;
    await askForKey(key);
  }
}

let asking = null; // one dialog for all who wait
function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const door = at("door");
    if (refused) at("door-note").textContent = "That was not the key of this server.";
    at("key").value = "";
    door.addEventListener("cancel", (event) => event.preventDefault(), { once: true });
    door.addEventListener("close", () => {
      sessionStorage.setItem(KEY, at("key").value);
      asking = null;
      resolve();
    }, { once: true });
    door.showModal();
  });
  return asking;
}

// The chat

function bubble(role, text) {
  const log = at("log");
  const element = document.createElement("div");
  element.className = `message ${role}`;
  const body = document.createElement("span");
  body.textContent = text;
  element.append(body);
  log.append(element);
  log.scrollTop = log.scrollHeight;
  return { element, body };
}

function remark(element, text, kind = "faint") {
  const note = document.createElement("span");
  note.className = kind;
  note.textContent = text;
  element.append(note);
}

async function send() {
  const text = at("text").value.trim();
  if (!text || going) return;
  at("text").value = "";
  messages.push({ role: "user", content: text });
  bubble("user", text);
  const { element, body } = bubble("assistant", "");
  const log = at("log");
  going = new AbortController();
  busy(true);
  const conversation = messages;
  try {
    const options = { temperature: at("temperature").valueAsNumber, max_tokens: at("tokens").valueAsNumber };
    const done = await ask(request, messages, options, going.signal, (piece) => {
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      body.textContent += piece;
      if (atEnd) log.scrollTop = log.scrollHeight;
    });
    remark(element, done);
  } catch (error) {
    const stopped = error.name === "AbortError";
    remark(element, stopped ? "stopped" : error.message, stopped ? "faint" : "error");
  }
  if (conversation === messages) {
    if (body.textContent) messages.push({ role: "assistant", content: body.textContent });
    else messages.pop(); // it was not answered
  }
  log.scrollTop = log.scrollHeight;
  going = null;
  busy(false);
  at("text").focus();
}

function busy(is) {
  at("stop").hidden = !is;
  at("send").disabled = is;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") going?.abort();
});
at("stop").addEventListener("click", () => going?.abort());
at("clear").addEventListener("click", () => {
  going?.abort();
  messages = [];
  at("log").replaceChildren();
  at("text").focus();
});

// The server

function say(text, bad = false) {
  at("state").textContent = text;
  at("state").className = bad ? "bad" : "";
}

async function watch() {
  try {
    const answer = await request("metrics");
    if (!answer.ok) throw new Error();
    show(parse(await answer.text()), performance.now() / 1000);
    say("serving");
  } catch {
    say("no answer", true);
  }
  setTimeout(tick, 1000);
}

function tick() {
  if (document.hidden) document.addEventListener("visibilitychange", tick, { once: true });
  else watch();
}

tick();
