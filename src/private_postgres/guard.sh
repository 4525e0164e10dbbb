# Runs a throw-away server in the working directory, from initdb until it has ended, and removes the directory then.
# Holds the directory's lock as its standard output. Standard input ends without a line if the process that has started
# this was killed before the server could end by itself.
# Arguments: the directory, initdb, postgres, and arguments of postgres.
trap '' HUP INT QUIT TERM
dir=$1 initdb=$2 postgres=$3
shift 3
make() {
    rm -rf pgdata && "$initdb" -D pgdata -U postgres --auth=trust -E UTF8 --no-sync "$1" </dev/null >/dev/null
}
status=1
if make --locale=C.UTF-8 || make --no-locale; then
    exec 3<&0
    "$postgres" -D pgdata "$@" </dev/null >/dev/null 3<&- &
    server=$!
    # A server that has just begun ignores the signal.
    { read -r line || while kill -s INT "$server"; do sleep 0.1; done; } <&3 2>/dev/null &
    exec 3<&-
    wait "$server"
    status=$?
fi
# The sessions of a server that was killed may be at work on a query.
for process in /proc/[0-9]*; do
    if [ "$process/cwd" -ef pgdata ]; then kill -s QUIT "${process##*/}"; fi
done 2>/dev/null
until rm -rf pgdata; do sleep 0.1; done
rm -rf postgres.log .s.PGSQL.*
# From now on another process may make them anew.
rm -f lock
rmdir "$dir"
exit "$status"
