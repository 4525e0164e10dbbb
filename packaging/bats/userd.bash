# For tests with bats: `load userd`, or `bats_load_library userd` where a package has installed it. Then
#
#     setup() { userd_start; }    # "$userd_url" is a service on a fresh database
#     teardown() { userd_stop; }
#
# USERD names the program; arguments of userd_start are the program's.

userd_start() {
    # Its standard input ends with this shell. bats waits for processes that hold its descriptor 3.
    coproc USERD_PROCESS {
        exec "${USERD:-userd}" --embedded --ephemeral --port 0 --with-parent "$@" 3>&-
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
    local input=${USERD_PROCESS[1]-}
    [ -z "$input" ] || exec {input}>&-
    wait ${userd_pid:+"$userd_pid"}
}
