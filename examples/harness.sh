#!/bin/sh
# A test in a shell script: the service from nothing, on a database of its own, gone with the script however
# it ends. USERD names the program.
set -eu

# Without a service, the script starts itself again beside one.
userd=${USERD:-userd}
command -v "$userd" >/dev/null || { echo "$userd is not there: set USERD" >&2; exit 1; }
[ -n "${USERD_URL:-}" ] || exec "$userd" test -- sh "$0" "$@"

expect() { # status, then curl's arguments
    wanted=$1
    shift
    status=$(curl -s --noproxy '*' -o /dev/null -w '%{http_code}' "$@")
    [ "$status" = "$wanted" ] || { echo "$*: $status instead of $wanted" >&2; exit 1; }
}

ada='{"name":"Ada Lovelace","email":"ada@example.com"}'
expect 201 "$USERD_URL/users" -d "$ada"
expect 409 "$USERD_URL/users" -d "$ada"
expect 400 "$USERD_URL/users" -d '{"name":"Ada Lovelace"}'
expect 200 "$USERD_URL/users/1"
expect 204 -X DELETE "$USERD_URL/users/1"
expect 404 "$USERD_URL/users/1"
# A create whose answer is lost can be repeated with its key.
expect 204 "$USERD_CONTROL/faults" -d '{"fault":"answer-lost","method":"POST","path":"/users"}'
expect 000 -H 'Idempotency-Key: 1' "$USERD_URL/users" -d "$ada" || true
expect 201 -H 'Idempotency-Key: 1' "$USERD_URL/users" -d "$ada"
echo passed
