// A test with vitest, in TypeScript: vitest run, where userd is installed.
import { onTestFailed, test, expect } from "vitest";
import { startUserd } from "userd";

test("a user is created and read", async () => {
  await using userd = await startUserd();
  onTestFailed(() => console.error(userd.explain()));
  const ada = { name: "Ada Lovelace", email: "ada@example.com" };
  const created = await fetch(`${userd.url}/users`, { method: "POST", body: JSON.stringify(ada) });
  expect(created.status).toBe(201);
  const read = await fetch(userd.url + created.headers.get("Location"));
  expect(await read.json()).toMatchObject(ada);
  // The first service of a machine also makes its cluster.
}, 60_000);
