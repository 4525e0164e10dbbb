// A service for each test: startUserd. No dependency, and nothing of it outlives this process, however that ends.

const { command, withPostgres } = require("./programs.js");

// A test may replace modules, their functions, fetch and timers.
const processes = (process.getBuiltinModule ?? require)("node:child_process");
const { spawn } = processes;
const { connect } = (process.getBuiltinModule ?? require)("node:net");

/** The largest list of users, if this process starts `userd test`. */
const MAX_BODY_BYTES = 16 << 20;

/** The processes by their programs. All files of tests that Jest runs in this process have them, unlike a module's variables. */
const shared = (processes[Symbol.for("userd")] ??= new Map());

/** Sends a request to a control. Returns the value in the answer. It asks no proxy of the environment. */
async function ask(method, url, body) {
  const { hostname, port, host, pathname, search } = new URL(url);
  const data = Buffer.from(body === undefined ? "" : JSON.stringify(body));
  const head = `${method} ${pathname}${search} HTTP/1.0\r\nHost: ${host}\r\nContent-Length: ${data.length}\r\n\r\n`;
  const answer = await new Promise((resolve, reject) => {
    const socket = connect(Number(port || 80), hostname.replace(/^\[|\]$/g, ""));
    const parts = [];
    socket.on("data", (part) => parts.push(part));
    socket.on("error", reject);
    socket.on("close", () => resolve(Buffer.concat(parts).toString()));
    socket.write(Buffer.concat([Buffer.from(head), data]));
  });
  const [, status, text] = /^HTTP\/1\.[01] (\d)[^]*?\r\n\r\n([^]*)$/.exec(answer) ?? [];
  const value = text ? JSON.parse(text) : undefined;
  if (status !== "2") throw new Error(value?.message ?? value?.error ?? `no answer to ${method} ${pathname}`);
  return value;
}

/** Starts `userd test`. It ends with its standard input, and so with this process, which does not wait for it. */
async function start(program) {
  const child = spawn(program, ["test", "--set", `MAX_BODY_BYTES=${MAX_BODY_BYTES}`], {
    env: withPostgres(process.env),
  });
  const found = { log: "" };
  child.stderr.on("data", (text) => (found.log = (found.log + text).slice(-8192)));
  child.stdin.on("error", () => {});
  let said = "";
  await new Promise((resolve, reject) => {
    child.on("error", reject);
    child.on("close", resolve);
    child.stdout.on("data", (text) => (said += text).endsWith("\n\n") && resolve());
  });
  [, found.control] = /^USERD_CONTROL=(.*)$/m.exec(said) ?? [];
  if (found.control === undefined) throw new Error(found.log || `${program} has ended`);
  child.unref();
  // Bun's pipe for standard input has no such function.
  for (const pipe of child.stdio) pipe?.unref?.();
  return found;
}

/** The process with the controls that start services. */
async function tester(program) {
  if (process.env.USERD_CONTROL) return { control: process.env.USERD_CONTROL, log: "" };
  if (!shared.has(program)) shared.set(program, start(program));
  return shared.get(program);
}

class Userd {
  #tester;
  #ended = false;
  #last = [];

  constructor(tester, { url, control, databaseUrl }) {
    this.#tester = tester;
    Object.assign(this, { url, control, databaseUrl });
  }

  async reset() {
    await ask("POST", `${this.control}/reset`);
  }

  async save(name) {
    await ask("PUT", `${this.control}/states/${name}`);
  }

  async restore(name) {
    await ask("POST", `${this.control}/states/${name}`);
  }

  async requests(method, path) {
    const given = Object.entries({ method, path }).filter(([, value]) => value !== undefined);
    return (await ask("GET", `${this.control}/requests?${new URLSearchParams(given)}`)).requests;
  }

  async fail(fault, method, path, more = {}) {
    await ask("POST", `${this.control}/faults`, { fault, method, path, ...more });
  }

  async failNone() {
    await ask("DELETE", `${this.control}/faults`);
  }

  async faultsLeft() {
    return (await ask("GET", `${this.control}/faults`)).left;
  }

  async advance(seconds) {
    await ask("POST", `${this.control}/time`, { advance: seconds });
  }

  explain() {
    const requests = this.#last.map((request) => JSON.stringify(request));
    return [`${this.url}, its last requests:`, ...requests, "warnings and errors:", this.#tester.log.trim()].join("\n");
  }

  async stop() {
    if (this.#ended) return;
    this.#ended = true;
    this.#last = (await this.requests()).slice(-10);
    const left = await this.faultsLeft();
    await ask("DELETE", this.control);
    if (left > 0) throw new Error(`${left} requests were to fail, and have not come`);
  }
}

Userd.prototype[Symbol.asyncDispose] = Userd.prototype.stop;

/** See index.d.ts. */
async function startUserd(settings = {}, { users = [], test, userd } = {}) {
  const found = await tester(userd ?? command());
  const service = new Userd(found, await ask("POST", `${found.control}/services`, { settings, users }));
  test?.after(async () => {
    try {
      await service.stop();
    } finally {
      if (test.passed === false) service.explain().split("\n").forEach((line) => test.diagnostic(line));
    }
  });
  return service;
}

exports.startUserd = startUserd;
exports.command = command;
