"""What a user would write instead: Flask with a pool of connections and prepared statements.

    DATABASE_URL=... gunicorn --workers 2 --threads 8 --bind 127.0.0.1:PORT app:app
"""

import os

import psycopg
from flask import Flask, jsonify, request
from psycopg_pool import ConnectionPool

COLUMNS = "id, name, email, created_at, updated_at"
app = Flask(__name__)
pool = ConnectionPool(os.environ["DATABASE_URL"], min_size=4, max_size=4, kwargs={"autocommit": True})


def query(sql, *parameters):
    with pool.connection() as connection:
        return connection.execute(sql, parameters, prepare=True).fetchall()


def user(row):
    id, name, email, created, updated = row
    return {"id": str(id), "name": name, "email": email, "createdAt": created.isoformat(), "updatedAt": updated.isoformat()}


@app.get("/users/<int:id>")
def find(id):
    rows = query(f"select {COLUMNS} from users where id = %s", id)
    return user(rows[0]) if rows else ({"error": "Not found"}, 404)


@app.get("/users")
def index():
    if email := request.args.get("email"):
        return {"data": [user(row) for row in query(f"select {COLUMNS} from users where lower(email) = lower(%s)", email)]}
    page, size = int(request.args.get("page", 1)), int(request.args.get("perPage", 15))
    total = query("select count(*) from users")[0][0]
    rows = query(f"select {COLUMNS} from users order by id limit %s offset %s", size, (page - 1) * size)
    return {"data": [user(row) for row in rows], "total": total, "perPage": size, "currentPage": page}


@app.post("/users")
def create():
    new = request.get_json()
    sql = f"insert into users (name, email) values (%s, %s) returning {COLUMNS}"
    return user(query(sql, new["name"], new["email"])[0]), 201


@app.put("/users/<int:id>")
def update(id):
    new = request.get_json()
    sql = f"""update users set name = coalesce(%s::text, name), email = coalesce(%s::text, email), updated_at = now()
              where id = %s returning {COLUMNS}"""
    rows = query(sql, new.get("name"), new.get("email"), id)
    return user(rows[0]) if rows else ({"error": "Not found"}, 404)


@app.delete("/users/<int:id>")
def delete(id):
    return ("", 204) if query("delete from users where id = %s returning id", id) else ({"error": "Not found"}, 404)


@app.errorhandler(psycopg.errors.UniqueViolation)
def taken(_):
    return jsonify(error="Already exists"), 409
