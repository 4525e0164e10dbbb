// Reset, failures and time on command: node --test faults.test.mjs, where userd is installed.
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
