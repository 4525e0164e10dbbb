// What a user would write instead: Express with a pool of connections and prepared statements.
//
//     DATABASE_URL=... PORT=... node app.mjs
import express from "express";
import pg from "pg";

const COLUMNS = "id, name, email, created_at, updated_at";
const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 8 });
const app = express();
app.use(express.json());

// A statement that has a name is prepared once for each connection.
const query = async (name, text, ...values) => (await pool.query({ name, text, values })).rows;

const user = ({ id, name, email, created_at, updated_at }) => ({ id, name, email, createdAt: created_at, updatedAt: updated_at });

const answer = (response, rows) => (rows.length ? response.json(user(rows[0])) : response.status(404).json({ error: "Not found" }));

app.get("/users/:id", async (request, response) => {
  answer(response, await query("find", `select ${COLUMNS} from users where id = $1`, request.params.id));
});

app.get("/users", async (request, response) => {
  const { email, page = 1, perPage = 15 } = request.query;
  if (email) {
    const rows = await query("email", `select ${COLUMNS} from users where lower(email) = lower($1)`, email);
    return response.json({ data: rows.map(user) });
  }
  const [{ total }] = await query("count", "select count(*) as total from users");
  const rows = await query("page", `select ${COLUMNS} from users order by id limit $1 offset $2`, perPage, (page - 1) * perPage);
  response.json({ data: rows.map(user), total: Number(total), perPage: Number(perPage), currentPage: Number(page) });
});

app.post("/users", async (request, response) => {
  const { name, email } = request.body;
  const sql = `insert into users (name, email) values ($1, $2) returning ${COLUMNS}`;
  response.status(201).json(user((await query("create", sql, name, email))[0]));
});

app.put("/users/:id", async (request, response) => {
  const { name, email } = request.body;
  const sql = `update users set name = coalesce($1, name), email = coalesce($2, email), updated_at = now()
    where id = $3 returning ${COLUMNS}`;
  answer(response, await query("update", sql, name, email, request.params.id));
});

app.delete("/users/:id", async (request, response) => {
  const rows = await query("delete", "delete from users where id = $1 returning id", request.params.id);
  rows.length ? response.sendStatus(204) : response.status(404).json({ error: "Not found" });
});

app.use((error, request, response, next) => {
  response.status(error.code === "23505" ? 409 : 500).json({ error: error.code === "23505" ? "Already exists" : "Database error" });
});

app.listen(Number(process.env.PORT), "127.0.0.1");
