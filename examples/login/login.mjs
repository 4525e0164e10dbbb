// Sign up, log in and out, change and reset a password: Node.js alone in front of userd, which keeps the users.
//
//     TRUSTED_PROXIES=127.0.0.1 userd --embedded
//     node login.mjs
//
// USERD_URL says where userd is, USERD_TOKEN, USERD_TOKEN_READ and USERD_TOKEN_LOGIN are its tokens, PORT says where this
// listens; INSECURE=1 is for plain http on your own machine. Sessions and reset tokens are in this process's memory: put them
// into a table of yours, keyed by the same hashes, to keep them or to share them.

import { createHash, randomBytes } from "node:crypto";
import { createServer, request as ask } from "node:http";

const USERD = process.env.USERD_URL ?? "http://127.0.0.1:3000";
const SECURE = process.env.INSECURE === "1" ? "" : "; Secure";
const [DAY, HALF_AN_HOUR, MOST_BYTES] = [86400, 1800, 16384];

/** Secrets that stand for a user for some time: kept hashed, so that who reads them cannot use them. */
class Tickets {
  #users = new Map();
  #seconds;

  constructor(seconds) {
    this.#seconds = seconds;
  }

  #key(ticket) {
    return createHash("sha256").update(ticket ?? "").digest("hex");
  }

  issue(user) {
    const now = performance.now();
    for (const [key, found] of this.#users) if (found.end <= now) this.#users.delete(key);
    const ticket = randomBytes(32).toString("base64url");
    this.#users.set(this.#key(ticket), { user, end: now + this.#seconds * 1000 });
    return ticket;
  }

  find(ticket) {
    const found = this.#users.get(this.#key(ticket));
    return found !== undefined && found.end > performance.now() ? found.user : undefined;
  }

  /** Finds it for the last time. */
  take(ticket) {
    const user = this.find(ticket);
    this.#users.delete(this.#key(ticket));
    return user;
  }

  endAllOf(user) {
    for (const [key, found] of this.#users) if (found.user === user) this.#users.delete(key);
  }
}

const sessions = new Tickets(DAY);
const resets = new Tickets(HALF_AN_HOUR);

/**
 * Status and JSON of userd's answer. It counts attempts by the address that this application saw, never by what a client
 * says of itself. (Behind a proxy of yours, take the address that this proxy reports.)
 */
function userd(client, method, path, body) {
  const headers = { "X-Forwarded-For": client, "Content-Type": "application/json" };
  // The token with the least rights.
  const right = path === "/users/authenticate" ? "_LOGIN" : method === "GET" ? "_READ" : "";
  const token = process.env[`USERD_TOKEN${right}`] ?? process.env.USERD_TOKEN;
  if (token) headers.Authorization = `Bearer ${token}`;
  return new Promise((resolve, reject) => {
    const asked = ask(USERD + path, { method, headers, timeout: 15000 }, async (answer) => {
      try {
        resolve({ status: answer.statusCode, body: JSON.parse((await text(answer, Infinity)) || "null") });
      } catch (error) {
        reject(error);
      }
    });
    asked.on("timeout", () => asked.destroy(new Error("userd does not answer")));
    asked.on("error", reject).end(body === undefined ? undefined : JSON.stringify(body));
  });
}

async function text(stream, most) {
  const chunks = [];
  let length = 0;
  for await (const chunk of stream) {
    length += chunk.length;
    if (length > most) throw Object.assign(new Error("too large"), { status: 413 });
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString();
}

const cookie = (value, age) => ({
  "Set-Cookie": `session=${value}; Path=/; Max-Age=${age}; HttpOnly; SameSite=Lax${SECURE}`,
});
const notLoggedIn = { status: 401, body: { error: "Not logged in" } };

/** A session with a new id: one that was there before the login is of no use afterwards. */
function loggedIn(session, user, status) {
  sessions.take(session);
  return { status, body: user, headers: cookie(sessions.issue(user.id), DAY) };
}

/** Ends every session and reset of the user: who knew the old password is out. */
async function setPassword({ client, session }, user, password) {
  const answer = await userd(client, "PUT", `/users/${user}`, { password });
  if (answer.status !== 200) return answer;
  sessions.endAllOf(user);
  resets.endAllOf(user);
  return loggedIn(session, answer.body, 200);
}

/** Mails the link in your application. Here it is printed. */
function send(email, token) {
  console.error(`reset ${email} ${token}`);
}

/** What userd refuses (too many attempts, taken, invalid) keeps its own status and words. */
const routes = {
  "GET /": async ({ client, session }) => {
    const user = sessions.find(session);
    const answer = user && (await userd(client, "GET", `/users/${user}`));
    return answer && answer.status !== 404 ? answer : notLoggedIn;
  },
  "POST /signup": async ({ client, session, form }) => {
    const answer = await userd(client, "POST", "/users", form("name", "email", "password"));
    return answer.status === 201 ? loggedIn(session, answer.body, 201) : answer;
  },
  "POST /login": async ({ client, session, form }) => {
    const answer = await userd(client, "POST", "/users/authenticate", form("email", "password"));
    return answer.status === 200 ? loggedIn(session, answer.body, 200) : answer;
  },
  "POST /logout": async ({ session }) => {
    sessions.take(session);
    return { status: 204, headers: cookie("", 0) };
  },
  "POST /password": async (asked) => {
    const user = sessions.find(asked.session);
    const found = user && (await userd(asked.client, "GET", `/users/${user}`));
    if (found?.status !== 200) return notLoggedIn;
    const { old, new: password } = asked.form("old", "new");
    const proof = { email: found.body.email, password: old };
    const answer = await userd(asked.client, "POST", "/users/authenticate", proof);
    return answer.status === 200 ? setPassword(asked, user, password) : answer;
  },
  // The same answer whether there is such a user or not.
  "POST /reset": async ({ client, form }) => {
    const { email } = form("email");
    const found = email && (await userd(client, "GET", `/users?email=${encodeURIComponent(email)}`));
    if (found?.status === 200 && found.body.data.length) send(email, resets.issue(found.body.data[0].id));
    return { status: 202, body: { message: "If there is such a user, a mail is on its way" } };
  },
};

/** Once: a second use finds nothing. A password that is refused costs the token as well. */
async function reset(asked, token) {
  const user = resets.take(token);
  if (user === undefined) return { status: 404, body: { error: "Not found" } };
  return setPassword(asked, user, asked.form("password").password);
}

async function answer(request) {
  const sent = new URLSearchParams(await text(request, MOST_BYTES));
  const asked = {
    client: request.socket.remoteAddress,
    session: /(?:^|; )session=([^;]*)/.exec(request.headers.cookie ?? "")?.[1],
    form: (...names) => Object.fromEntries(names.map((name) => [name, sent.get(name) ?? ""])),
  };
  const token = /^\/reset\/([\w-]+)$/.exec(request.url)?.[1];
  if (token && request.method === "POST") return reset(asked, token);
  const route = Object.hasOwn(routes, `${request.method} ${request.url}`) && routes[`${request.method} ${request.url}`];
  return route ? route(asked) : { status: 404, body: { error: "Not found" } };
}

const server = createServer(async (request, response) => {
  let said;
  try {
    said = await answer(request);
  } catch (error) {
    said = { status: error.status ?? 502, body: { error: error.status ? "Too large" : "userd does not answer" } };
  }
  response.writeHead(said.status, { "Content-Type": "application/json", ...said.headers });
  response.end(said.status === 204 ? undefined : `${JSON.stringify(said.body)}\n`);
});
server.listen(Number(process.env.PORT ?? 5000), "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
