// The page of the web chat, which uses the app's HTTP API. The model's text is never set as HTML.

const byId = (id) => document.getElementById(id);
const list = byId("list"), messages = byId("messages"), text = byId("text");

let open = null;       // id of the chat that is shown
let answering = false; // whether this page is receiving an answer

async function api(path, method = "GET", body = undefined) {
  const response = await fetch(`/api${path}`, {
    method,
    headers: body === undefined ? {} : { "content-type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).detail ?? response.statusText);
  return response.json();
}

function element(tag, className, content = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = content;
  return node;
}

function button(label, title, onClick) {
  const node = element("button", "", label);
  node.type = "button";
  node.title = title;
  node.setAttribute("aria-label", title);
  node.addEventListener("click", onClick);
  return node;
}

// --- the list of chats

async function showList() {
  const chats = await api("/chats");
  list.replaceChildren(...chats.map((chat) => {
    const item = element("li", chat.id === open ? "open" : "");
    const name = button(chat.title, chat.title, () => openChat(chat.id));
    name.className = "name";
    const remove = button("✕", `Delete ${chat.title}`, async () => {
      await api(`/chats/${chat.id}`, "DELETE");
      if (chat.id === open) await openChat(null);
      else await showList();
    });
    remove.className = "remove";
    item.append(name, remove);
    return item;
  }));
}

function showMenu(shown) {
  byId("chats").classList.toggle("shown", shown);
  byId("shade").hidden = !shown;
}

async function openChat(chatId) {
  open = chatId;
  history.replaceState(null, "", chatId === null ? "#" : `#${chatId}`);
  showMenu(false);
  await showChat();
  await showList();
}

// --- one chat

async function showChat() {
  const chat = open === null ? null : await api(`/chats/${open}`);
  byId("title").textContent = chat?.title ?? "Web chat";
  if (chat === null || chat.messages.length === 0) {
    messages.replaceChildren(element("p", "empty", "What would you like to know?"));
    return;
  }
  messages.replaceChildren(...chat.messages.map(messageNode));
  if (messages.lastChild.className === "user") messages.append(element("div", "tools"));
  [...messages.querySelectorAll(".tools")].at(-1).append(regenerateButton());
  messages.scrollTop = messages.scrollHeight;
}

function messageNode(message) {
  const node = element("article", message.role);
  node.append(element("div", "text", message.text));
  if (message.role === "assistant") node.append(thumbButtons(message));
  return node;
}

function thumbButtons(message) {
  const node = element("div", "tools");
  for (const [title, thumbs] of [["Good answer", 1], ["Bad answer", -1]]) {
    const thumb = button("", title, async () => {
      const changed = message.thumbs === thumbs ? 0 : thumbs;
      message = await api(`/messages/${message.id}/thumbs`, "POST", { thumbs: changed });
      for (const other of node.querySelectorAll("[data-thumbs]"))
        other.setAttribute("aria-pressed", Number(other.dataset.thumbs) === message.thumbs);
    });
    thumb.append(byId("thumb").content.cloneNode(true));
    thumb.dataset.thumbs = thumbs;
    thumb.setAttribute("aria-pressed", message.thumbs === thumbs);
    node.append(thumb);
  }
  return node;
}

function regenerateButton() {
  return button("↻ Regenerate", "Regenerate this answer", () => receive(`/chats/${open}/regenerate`));
}

// --- questions and answers

async function ask() {
  const question = text.value.trim();
  if (!question || answering) return;
  text.value = "";
  resizeInput();
  if (open === null) {
    open = (await api("/chats", "POST")).id;
    history.replaceState(null, "", `#${open}`);
  }
  messages.querySelector(".empty")?.remove();
  messages.append(messageNode({ role: "user", text: question }));
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
  setBusy(true);
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
  setBusy(false);
  if (chatId !== open) return;
  await showChat();
  await showList();
  if (failed) messages.append(element("p", "error", failed));
}

// Yield the events of a streamed response. The browser's EventSource cannot send a POST.
async function* events(path, body) {
  const response = await fetch(`/api${path}`, {
    method: "POST",
    headers: body === undefined ? {} : { "content-type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).detail ?? response.statusText);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part.slice("data: ".length));
  }
}

function setBusy(busy) {
  answering = busy;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

function resizeInput() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

byId("composer").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
byId("stop").addEventListener("click", () => api(`/chats/${open}/stop`, "POST"));
byId("new").addEventListener("click", () => openChat(null).then(() => text.focus()));
byId("menu").addEventListener("click", () => showMenu(true));
byId("shade").addEventListener("click", () => showMenu(false));
text.addEventListener("input", resizeInput);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});

await openChat(Number(location.hash.slice(1)) || null).catch(() => openChat(null));
