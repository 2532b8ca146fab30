// One page over the app's HTTP API. Text from the model is set as text, never as HTML.

const at = (id) => document.getElementById(id);
const list = at("list"), messages = at("messages"), text = at("text");

let open = null;      // the chat that is shown
let answering = false; // whether an answer is on its way to this page

async function api(path, method = "GET", body = undefined) {
  const answer = await fetch(`/api${path}`, {
    method,
    headers: body === undefined ? {} : { "content-type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).detail ?? answer.statusText);
  return answer.json();
}

function element(tag, className, content = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = content;
  return made;
}

function button(label, title, onClick) {
  const made = element("button", "", label);
  made.type = "button";
  made.title = title;
  made.setAttribute("aria-label", title);
  made.addEventListener("click", onClick);
  return made;
}

// --- the list of chats

async function showList() {
  const chats = await api("/chats");
  list.replaceChildren(...chats.map((chat) => {
    const item = element("li", chat.id === open ? "open" : "");
    const name = button(chat.title, chat.title, () => go(chat.id));
    name.className = "name";
    const gone = button("✕", `Delete ${chat.title}`, async () => {
      await api(`/chats/${chat.id}`, "DELETE");
      if (chat.id === open) await go(null);
      else await showList();
    });
    gone.className = "gone";
    item.append(name, gone);
    return item;
  }));
}

function showMenu(shown) {
  at("chats").classList.toggle("shown", shown);
  at("shade").hidden = !shown;
}

async function go(chatId) {
  open = chatId;
  history.replaceState(null, "", chatId === null ? "#" : `#${chatId}`);
  showMenu(false);
  await showChat();
  await showList();
}

// --- one chat

async function showChat() {
  const chat = open === null ? null : await api(`/chats/${open}`);
  at("title").textContent = chat?.title ?? "Web chat";
  if (chat === null || chat.messages.length === 0) {
    messages.replaceChildren(element("p", "empty", "What would you like to know?"));
    return;
  }
  messages.replaceChildren(...chat.messages.map(shown));
  if (messages.lastChild.className === "user") messages.append(element("div", "tools"));
  [...messages.querySelectorAll(".tools")].at(-1).append(again());
  messages.scrollTop = messages.scrollHeight;
}

function shown(message) {
  const made = element("article", message.role);
  made.append(element("div", "text", message.text));
  if (message.role === "assistant") made.append(tools(message));
  return made;
}

function tools(message) {
  const made = element("div", "tools");
  for (const [title, thumbs] of [["Good answer", 1], ["Bad answer", -1]]) {
    const thumb = button("", title, async () => {
      const said = message.thumbs === thumbs ? 0 : thumbs;
      message = await api(`/messages/${message.id}/thumbs`, "POST", { thumbs: said });
      for (const other of made.querySelectorAll("[data-thumbs]"))
        other.setAttribute("aria-pressed", Number(other.dataset.thumbs) === message.thumbs);
    });
    thumb.append(at("thumb").content.cloneNode(true));
    thumb.dataset.thumbs = thumbs;
    thumb.setAttribute("aria-pressed", message.thumbs === thumbs);
    made.append(thumb);
  }
  return made;
}

function again() {
  return button("↻ Regenerate", "Regenerate this answer", () => receive(`/chats/${open}/regenerate`));
}

// --- asking

async function ask() {
  const question = text.value.trim();
  if (!question || answering) return;
  text.value = "";
  grow();
  if (open === null) {
    open = (await api("/chats", "POST")).id;
    history.replaceState(null, "", `#${open}`);
  }
  messages.querySelector(".empty")?.remove();
  messages.append(shown({ role: "user", text: question }));
  await receive(`/chats/${open}/messages`, { text: question });
}

async function receive(path, body = undefined) {
  const chatId = open;
  if (path.endsWith("/regenerate") && messages.lastChild?.className === "assistant") messages.lastChild.remove();
  const article = element("article", "assistant waiting");
  const content = element("div", "text");
  article.append(content);
  messages.append(article);
  messages.scrollTop = messages.scrollHeight;
  busy(true);
  let failed = null;
  try {
    for await (const event of events(path, body)) {
      if (event.type === "piece") content.textContent += event.text;
      if (event.type === "error") failed = event.text;
      messages.scrollTop = messages.scrollHeight;
    }
  } catch (error) {
    failed = error.message;
  }
  busy(false);
  if (chatId !== open) return;
  await showChat();
  await showList();
  if (failed) messages.append(element("p", "error", failed));
}

// The browser's EventSource cannot post.
async function* events(path, body) {
  const answer = await fetch(`/api${path}`, {
    method: "POST",
    headers: body === undefined ? {} : { "content-type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).detail ?? answer.statusText);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part.slice("data: ".length));
  }
}

function busy(is) {
  answering = is;
  at("send").hidden = is;
  at("stop").hidden = !is;
}

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

at("composer").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
at("stop").addEventListener("click", () => api(`/chats/${open}/stop`, "POST"));
at("new").addEventListener("click", () => go(null).then(() => text.focus()));
at("menu").addEventListener("click", () => showMenu(true));
at("shade").addEventListener("click", () => showMenu(false));
text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});

await go(Number(location.hash.slice(1)) || null).catch(() => go(null));
