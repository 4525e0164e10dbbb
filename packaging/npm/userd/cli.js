#!/usr/bin/env node
// npx userd: the command; `npx userd test` with PostgreSQL's programs of a package. It ends when this process does.

const { spawn } = require("node:child_process");
const { command, withPostgres } = require("./programs.js");

const given = process.argv.slice(2);
const tests = given[0] === "test";
const env = tests ? withPostgres(process.env) : process.env;
// The command beside the service has the environment of this process.
const added = ["POSTGRES_BIN", "LD_LIBRARY_PATH"].filter((name) => env[name] !== process.env[name]);
const kept = added.filter((name) => name in process.env).map((name) => `${name}=${process.env[name]}`);
const restored = [...added.flatMap((name) => ["-u", name]), ...kept];
if (added.length > 0 && given.includes("--")) given.splice(given.indexOf("--") + 1, 0, "env", ...restored);
const child = spawn(command(), given, { stdio: "inherit", env });
// A terminal sends SIGINT to both. A service takes two for one, a command of a test does not.
const passed = tests && process.stderr.isTTY ? ["SIGTERM"] : ["SIGINT", "SIGTERM", "SIGHUP"];
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) process.on(signal, () => passed.includes(signal) && child.kill(signal));
// The shell that npm starts this from ends with npm, and passes no signal on.
const shell = process.ppid;
const stop = () => process.ppid !== shell && child.kill("SIGTERM");
if (process.env.npm_command) setInterval(stop, 250).unref();
child.on("error", (error) => {
  console.error(`userd: ${error.message}`);
  process.exitCode = 1;
});
child.on("exit", (code, signal) => {
  process.exitCode = code ?? 1;
  if (signal) {
    process.removeAllListeners(signal);
    process.kill(process.pid, signal);
  }
});
