// States, requests, failures and time on command: node --test faults.test.mjs, where userd is installed.
import assert from "node:assert/strict";
import { test } from "node:test";
import { startUserd } from "userd";

const create = async ({ url }, name, headers = {}) => {
  const body = JSON.stringify({ name, email: `${name}@example.com` });
  return (await (await fetch(`${url}/users`, { method: "POST", body, headers })).json()).id;
};
const headers = { "Idempotency-Key": "a-key" };

test("reset", async (t) => {
  const userd = await startUserd({}, { test: t });
  await create(userd, "ada");
  await userd.reset();
  assert.equal(await create(userd, "ada"), "1");
});

test("save and restore", async (t) => {
  const userd = await startUserd({}, { test: t });
  await create(userd, "ada");
  await userd.save("one_user");
  await create(userd, "grace");
  await userd.restore("one_user");
  assert.equal(await create(userd, "alan"), "2");
});

test("requests", async (t) => {
  const userd = await startUserd({}, { test: t });
  await create(userd, "ada", { Authorization: "Bearer secret" });
  const [{ target, headers, body }, ...others] = await userd.requests("POST", "/users");
  assert.deepEqual([target, headers.authorization, body.name, others], ["/users", "***", "ada", []]);
});

test("slow", async (t) => {
  const userd = await startUserd({}, { test: t });
  await userd.fail("slow", "POST", "/users", { seconds: 0.1 });
  const start = performance.now();
  await create(userd, "ada");
  assert.ok(performance.now() - start >= 100);
});

test("several users by id", async (t) => {
  const userd = await startUserd({}, { test: t });
  for (const name of ["ada", "grace", "alan"]) await create(userd, name);
  const { data } = await (await fetch(`${userd.url}/users?id=3&id=1&id=9`)).json();
  assert.deepEqual(data.map(({ name }) => name), ["ada", "alan"]);
});

test("fail", async (t) => {
  const userd = await startUserd({}, { test: t });
  await userd.fail("answer-lost", "POST", "/users");
  await assert.rejects(create(userd, "ada", headers));
  assert.equal(await create(userd, "ada", headers), "1");
});

test("advance", async (t) => {
  const userd = await startUserd({}, { test: t });
  await create(userd, "ada", headers);
  await userd.advance(24 * 3600);
  assert.equal(await create(userd, "grace", headers), "2");
});
