# For tests with bats: `load userd`, or `bats_load_library userd` where a package has installed it. Then
#
#     setup() { userd_start; }    # "$userd_url" is a service on a fresh database
#     teardown() { userd_stop; }  # fails the test where the service has ended badly
#
# USERD names the program. userd_start takes settings and then arguments of the program: `userd_start SCHEMA=strict`. Its
# variables in the environment have no effect.

userd_start() {
    local program=${USERD:-userd} settings=()
    local variables='/^Environment variables/,$ s/^  \([A-Z_]*\) .*/\1/p'
    variables=$("$program" --help | sed -n "$variables")
    while [[ ${1-} == [A-Z]*=* ]]; do
        settings+=("$1")
        shift
    done
    # Its standard input ends with this shell. bats waits for processes that hold its descriptor 3.
    coproc USERD_PROCESS {
        # shellcheck disable=SC2086
        unset $variables
        exec env "${settings[@]}" "$program" --embedded --ephemeral --port 0 --with-parent "$@" 3>&-
    }
    # bash forgets it when the process ends.
    userd_pid=$USERD_PROCESS_PID
    # listening on http://127.0.0.1:41234
    if ! read -r _ _ userd_url <&"${USERD_PROCESS[0]}"; then
        echo "userd did not start" >&2
        return 1
    fi
}

userd_stop() {
    local input=${USERD_PROCESS[1]-} status=0
    [ -z "$input" ] || exec {input}>&-
    wait ${userd_pid:+"$userd_pid"} || status=$?
    [ $status = 0 ] || echo "userd ended with $status" >&2
    return $status
}
