// A client of openapi-typescript and openapi-fetch as they come, driven through every operation on users: each answer is
// compared, and what a change did is read back. The address of a service is the argument.
import assert from "node:assert/strict";
import createClient from "openapi-fetch";
import type { components, paths } from "./generated.js";

type User = components["schemas"]["User"];
type UserToCreate = components["schemas"]["UserToCreate"];

const [url, parser, full] = process.argv.slice(2) as [string, string, string];
const client = createClient<paths>({ baseUrl: url });
const ada: UserToCreate = { name: "Ada Lovelace", email: "ada@example.com", password: "correct horse" };

const created = await client.POST("/users", { body: ada });
assert.equal(created.response.status, 201);
const user: User = created.data!;
const path = { params: { path: { id: user.id } } };
assert.deepEqual((await client.GET("/users/{id}", path)).data, user);

const taken = await client.POST("/users", { body: ada });
assert.deepEqual([taken.response.status, taken.error], [409, { error: "Already exists" }]);
const invalid = await client.POST("/users", { body: { ...ada, email: "none" } });
assert.equal(invalid.response.status, 400);
assert.equal((invalid.error as components["schemas"]["Problem"]).errors?.[0]?.path, "/email");
const refused = await createClient<paths>({ baseUrl: parser }).POST("/users", { body: { ...ada, email: "none" } });
assert.equal(refused.response.status, 422);
assert.equal((refused.error as components["schemas"]["Unprocessable"]).errors?.[0]?.path, "/email");

const put = await client.PUT("/users/{id}", { ...path, body: { name: "Ada King" } });
assert.equal(put.data?.name, "Ada King");
const tag = put.response.headers.get("ETag")!;
const patched = await client.PATCH("/users/{id}", {
  params: { path: { id: user.id }, header: { "If-Match": tag } },
  body: { email: "countess@example.com" },
});
assert.equal(patched.data?.email, "countess@example.com");
const changed = await client.PATCH("/users/{id}", {
  params: { path: { id: user.id }, header: { "If-Match": tag } },
  body: { email: "other@example.com" },
});
assert.deepEqual([changed.response.status, changed.error], [412, { error: "Precondition failed" }]);
assert.equal((await client.GET("/users/{id}", path)).data?.email, "countess@example.com");
assert.equal((await client.HEAD("/users/{id}", path)).response.status, 200);
assert.equal((await client.OPTIONS("/users/{id}", path)).response.headers.get("Allow")?.includes("PATCH"), true);

const list = await client.GET("/users", { params: { query: { page: 1, perPage: 1 } } });
assert.deepEqual([list.data?.total, list.data?.data.length], [1, 1]);
const walk = await client.GET("/users", { params: { query: { after: 0 } } });
assert.deepEqual([walk.data?.total, walk.data?.data[0]?.id], [undefined, user.id]);
const found = await client.GET("/users", { params: { query: { email: "countess@example.com" } } });
assert.equal(found.data?.data[0]?.id, user.id);
assert.equal((await client.HEAD("/users")).response.status, 200);
assert.equal((await client.OPTIONS("/users")).response.status, 204);
assert.equal((await client.GET("/users", { params: { query: { perPage: 100_000 } } })).response.status, 400);

const proof = { email: "countess@example.com", password: "correct horse" };
assert.equal((await client.POST("/users/authenticate", { body: proof })).data?.id, user.id);
const wrong = { email: "countess@example.com", password: "battery staple" };
let login = await client.POST("/users/authenticate", { body: wrong });
assert.deepEqual([login.response.status, login.error], [401, { error: "Invalid credentials" }]);
for (let n = 0; n < 20 && login.response.status === 401; n++) login = await client.POST("/users/authenticate", { body: wrong });
assert.deepEqual([login.response.status, login.error], [429, { error: "Too many attempts" }]);
assert.equal((await client.OPTIONS("/users/authenticate")).response.status, 204);

const unavailable = await createClient<paths>({ baseUrl: full }).GET("/users");
assert.deepEqual([unavailable.response.status, unavailable.error], [503, { error: "Service unavailable" }]);

assert.equal((await client.DELETE("/users/{id}", path)).response.status, 204);
const gone = await client.GET("/users/{id}", path);
assert.deepEqual([gone.response.status, gone.error], [404, { error: "Not found" }]);
console.log("TypeScript: every operation on users");
