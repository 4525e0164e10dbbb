#!/bin/sh
# A test in a shell script: the service from nothing, on a database of its own, gone with the script however
# it ends. USERD names the program.
set -eu

userd=${USERD:-userd}
command -v "$userd" >/dev/null || { echo "$userd is not there: set USERD" >&2; exit 1; }

# userd ends when its standard input does, which the script holds as descriptor 3. It gets no variable of the environment
# that it might take for a setting: HOST, for one, which conda sets.
pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
mkfifo "$pipes/in" "$pipes/out"
env -i PATH="$PATH" LOG_LEVEL=warn "$userd" --embedded --ephemeral --port 0 --with-parent --with-parent=$$ <"$pipes/in" >"$pipes/out" &
exec 3>"$pipes/in"
read -r _ _ url <"$pipes/out" # listening on http://127.0.0.1:41234
rm -r "$pipes"

expect() { # status, then curl's arguments
    wanted=$1
    shift
    status=$(curl -s -o /dev/null -w '%{http_code}' "$@")
    [ "$status" = "$wanted" ] || { echo "$*: $status instead of $wanted" >&2; exit 1; }
}

ada='{"name":"Ada Lovelace","email":"ada@example.com"}'
expect 201 "$url/users" -d "$ada"
expect 409 "$url/users" -d "$ada"
expect 400 "$url/users" -d '{"name":"Ada Lovelace"}'
expect 200 "$url/users/1"
expect 204 -X DELETE "$url/users/1"
expect 404 "$url/users/1"
echo passed
