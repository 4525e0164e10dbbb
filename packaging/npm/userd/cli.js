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
for (const signal of ["SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
// A terminal sends it to both.
process.on("SIGINT", () => {});
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
