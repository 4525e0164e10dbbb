#!/usr/bin/env node
// npx userd: the command, with PostgreSQL's programs of a package where nothing is kept. It ends when this process does.

import { spawn } from "node:child_process";
import { additions, command } from "./programs.js";

const given = process.argv.slice(2);
const added = additions(given, process.env);
const serves = given.length === 0 || given[0].startsWith("--") && !["--help", "--version"].includes(given[0]);
const tied = given.some((argument) => argument.startsWith("--with-parent"));
const parent = serves && !tied ? [`--with-parent=${process.pid}`] : [];
const child = spawn(command(), [...given, ...added.arguments, ...parent], {
  stdio: "inherit",
  env: { ...process.env, ...added.environment },
});
// A terminal sends SIGINT to both: a signal that comes twice is one.
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
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
