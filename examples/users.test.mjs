// A test with Node's own runner: node --test users.test.mjs, where userd is installed.
import assert from "node:assert/strict";
import { test } from "node:test";
import { startUserd } from "userd";

test("a user is created and read", async (t) => {
  // Ends with the test, and explains its failure.
  const { url } = await startUserd({ SCHEMA: "strict" }, { test: t });
  const ada = { name: "Ada Lovelace", email: "ada@example.com", password: "correct horse" };
  const created = await fetch(`${url}/users`, { method: "POST", body: JSON.stringify(ada) });
  assert.equal(created.status, 201);
  const read = await fetch(url + created.headers.get("Location"));
  assert.equal((await read.json()).name, "Ada Lovelace");
});
