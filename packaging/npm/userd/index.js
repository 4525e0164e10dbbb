// A service for each test: startUserd. No dependency, and nothing of it outlives this process, however that ends.

import processes from "node:child_process";
import { randomInt } from "node:crypto";
import files from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { additions, command } from "./programs.js";

/** As they are now: a test may replace them later. */
const { execFileSync, spawn } = processes;
const { closeSync, fstatSync, mkdtempSync, openSync, readSync, rmSync } = files;

/** Of the log, in an explanation. */
const LINES = 50;

/** Of the requests, in an explanation. */
const REQUESTS = 10;

let variables;

/** This process's environment without userd's variables, such as HOST, which conda sets; but with POSTGRES_BIN. */
function environment(program) {
  if (variables === undefined) {
    const manual = execFileSync(program, ["--help"], { encoding: "utf8" }).split("Environment variables")[1];
    variables = new Set([...manual.matchAll(/^ {2}([A-Z_]+) /gm)].map(([, name]) => name));
    variables.delete("POSTGRES_BIN");
  }
  return Object.fromEntries(Object.entries(process.env).filter(([name]) => !variables.has(name)));
}

/** Returns a setting, without its value if that may be a secret: the name of one may be misspelt. */
function shown([name, value], known) {
  return `${name}=${known.has(name) && !/PASS|TOKEN|URL/.test(name) ? value : "***"}`;
}

class Userd {
  #child;
  #log;
  #ended;
  #said;
  #program;
  #settings;
  #given;
  /** For answers on its standard output, in their order. */
  #waiting = [];
  #failing = false;
  /** Of the choices by chance, once there are some. */
  #seed;
  /** The last requests before the end. */
  #last = [];

  constructor(settings, { seed, userd }) {
    this.#program = userd ?? command();
    const given = ["--embedded", "--ephemeral", "--commands", "--port=0", "--with-parent"];
    // A child of this process may hold the other end of standard input after this process has ended.
    given.push(`--with-parent=${process.pid}`);
    const own = { ...environment(this.#program), ...settings };
    const added = additions(given, own);
    if (seed !== undefined) given.push("--seed", String(seed));
    this.#settings = { ...own, ...added.environment };
    this.#given = settings;
    const directory = mkdtempSync(join(tmpdir(), "userd-log-"));
    this.#log = openSync(join(directory, "log"), "a+");
    rmSync(directory, { recursive: true });
    this.#child = spawn(this.#program, [...given, ...added.arguments], {
      env: this.#settings,
      stdio: ["pipe", "pipe", this.#log],
    });
    // It ends with its standard input, and so with this process, which does not wait for it.
    this.#child.unref();
    // Bun's pipe for standard input has no such function, and its pipe for standard output does not forget a `ref`.
    this.#child.stdin.unref?.();
    this.#child.stdout.unref();
    this.#child.stdin.on("error", () => {});
    this.#ended = new Promise((resolve, reject) => {
      this.#child.on("error", reject);
      this.#child.on("exit", (code, signal) => resolve(code ?? signal));
    });
    this.#ended.catch(() => {});
  }

  async listening() {
    let text = "";
    let answer = [];
    this.#child.stdout.setEncoding("utf8").on("data", (data) => {
      const lines = (text + data).split("\n");
      text = lines.pop();
      for (const line of lines) {
        answer.push(line);
        // Requests follow their number.
        const [, count] = /^ok (\d+) \d+$/.exec(answer[0]) ?? [];
        if (answer.length <= Number(count ?? 0)) continue;
        this.#waiting.shift()?.(answer);
        answer = [];
      }
    });
    const found = /^listening on (\S+)$/.exec((await this.#answer())?.[0]);
    if (found === null) throw new Error(`userd did not start\n${this.explain()}`);
    this.url = found[1];
    return this;
  }

  /** The lines of the next answer; undefined where it has ended. */
  async #answer() {
    this.#child.ref();
    const lines = new Promise((resolve) => this.#waiting.push(resolve));
    const said = await Promise.race([lines, this.#ended.then(() => undefined)]);
    if (this.#waiting.length === 0) this.#child.unref();
    return said;
  }

  async #command(line) {
    if (this.#said === undefined) this.#child.stdin.write(`${line}\n`);
    const [answer, ...lines] = (this.#said === undefined ? await this.#answer() : undefined) ?? [];
    if (!/^ok\b/.test(answer)) throw new Error(`${line}: ${answer ?? "userd has ended"}`);
    return [answer.slice(3), ...lines];
  }

  async reset() {
    await this.#command("reset");
  }

  async save(name) {
    await this.#command(`save ${name}`);
  }

  async restore(name) {
    await this.#command(`restore ${name}`);
  }

  async requests(method, path) {
    const [, ...lines] = await this.#command(["requests", method, path].filter(Boolean).join(" "));
    return lines.map((line) => JSON.parse(line));
  }

  async chance(seed) {
    await this.#command(`chance ${seed}`);
    this.#seed = seed;
  }

  async fail(fault, method, path, times = 1) {
    if (String(times).endsWith("%") && this.#seed === undefined) await this.chance(randomInt(2 ** 32));
    this.#failing = true;
    await this.#command(`fail ${fault} ${method} ${path} ${times}`);
  }

  async failNone() {
    await this.#command("fail none");
  }

  async faultsLeft() {
    return Number((await this.#command("faults"))[0]);
  }

  async advance(seconds) {
    await this.#command(`advance ${seconds}`);
  }

  log() {
    if (this.#said !== undefined) return this.#said;
    try {
      const bytes = Buffer.alloc(fstatSync(this.#log).size);
      return bytes.toString("utf8", 0, readSync(this.#log, bytes, 0, bytes.length, 0));
    } catch (error) {
      // A test has replaced the file system; its own failure counts.
      return `the log cannot be read: ${error}`;
    }
  }

  explain() {
    const ask = (...given) => execFileSync(this.#program, given, { env: this.#settings, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] }).trim();
    const tell = (...given) => {
      try {
        return ask(...given);
      } catch {
        return "";
      }
    };
    const log = this.log();
    const programs = /PostgreSQL [^\n]*, programs in [^\n]*/.exec(log) ?? [];
    const rows = tell("config").split("\n").map((line) => line.split(/\s+/));
    const settings = rows.filter((row) => row.at(-1) === "environment").map((row) => `${row[0]}=${row.slice(1, -1).join(" ")}`);
    // A service that refuses its settings has no table of them, only a line in its log.
    if (settings.length === 0) {
      const known = new Set([...tell("--help").matchAll(/^  ([A-Z_]+)/gm)].map(([, name]) => name));
      settings.push(...Object.entries(this.#given).map((setting) => shown(setting, known)));
    }
    const ids = [...log.matchAll(/request_id=(\S+)/g)].map(([, id]) => id).slice(-LINES);
    return [
      `${tell("--version")} at ${this.url ?? "-"}, ${this.#program}`,
      ...programs,
      `settings: ${settings.join(", ") || "defaults"}`,
      ...(this.#seed === undefined ? [] : [`chance seed: ${this.#seed}`]),
      `request ids: ${ids.join(", ") || "none"}`,
      ...(this.#said === undefined ? [] : [`the last ${REQUESTS} requests:`, ...this.#last.map((one) => JSON.stringify(one))]),
      `the last ${LINES} lines of its log:`,
      ...log.trimEnd().split("\n").slice(-LINES),
    ].join("\n");
  }

  async stop() {
    if (this.#said !== undefined) return;
    // A service that has ended has none.
    const left = this.#failing ? await this.faultsLeft().catch(() => 0) : 0;
    this.#last = (await this.requests().catch(() => [])).slice(-REQUESTS);
    this.#child.ref();
    this.#child.stdin.end();
    const code = await this.#ended;
    const said = this.log();
    this.#said = said;
    try {
      closeSync(this.#log);
    } catch {
      // As in `log`.
    }
    if (code !== 0) throw new Error(`userd ended with ${code}\n${this.explain()}`);
    if (left > 0) throw new Error(`${left} requests were to fail, and have not come`);
  }

  async [Symbol.asyncDispose]() {
    await this.stop();
  }
}

/** See index.d.ts. */
export async function startUserd(settings = {}, options = {}) {
  const service = await new Userd(settings, options).listening();
  options.test?.after(async () => {
    await service.stop();
    if (options.test.passed !== false) return;
    for (const line of service.explain().split("\n")) options.test.diagnostic(line);
  });
  return service;
}

export { command };
