# For tests with bats: `load userd`, or `bats_load_library userd` where a package has installed it. Then
#
#     setup() { userd_start; }    # "$userd_url" is a service on a fresh database
#     teardown() { userd_stop; }  # fails the test where the service has ended badly, and explains a failure of the test
#
# USERD names the program. userd_start takes settings and then arguments of the program: `userd_start SCHEMA=strict --seed
# users.csv`. `userd_reset`, `userd_fail answer-lost POST /users 1` and `userd_advance 61` are commands to it, not for `run`:
# a subshell has no pipe to the service. A test fails that leaves faults. Its variables in the environment have no effect, but for POSTGRES_BIN.

userd_start() {
    local program=${USERD:-userd} settings=()
    local variables='/^Environment variables/,$ s/^  \([A-Z_]*\) .*/\1/p'
    variables=$("$program" --help | sed -n "$variables" | grep -vx POSTGRES_BIN)
    while [[ ${1-} == [A-Z]*=* ]]; do
        settings+=("$1")
        shift
    done
    userd_log=$(mktemp)
    # With the settings that the service gets.
    userd_run() (
        # shellcheck disable=SC2086
        unset $variables
        exec env "${settings[@]}" "$program" "$@"
    )
    userd_settings=$(userd_run config | sed -n 's/^\([A-Z_]*\)  *\(.*[^ ]\)  *environment$/\1=\2/p' | paste -sd ' ')
    # Its standard input ends with this shell. bats waits for processes that hold its descriptor 3.
    coproc USERD_PROCESS {
        userd_run --embedded --ephemeral --commands --port 0 --with-parent "--with-parent=$$" \
            "$@" 2>"$userd_log" 3>&-
    }
    # bash forgets it when the process ends.
    userd_pid=$USERD_PROCESS_PID
    # listening on http://127.0.0.1:41234
    if ! read -r _ _ userd_url <&"${USERD_PROCESS[0]}"; then
        echo "userd did not start" >&2
        cat "$userd_log" >&2
        return 1
    fi
}

userd_reset() { userd_command reset; }
userd_fail() { userd_command fail "$@"; }
userd_advance() { userd_command advance "$@"; }

# Sends a line to the service, whose answer is `ok`, with $userd_said behind it, or fails.
userd_command() {
    local said
    echo "$*" >&"${USERD_PROCESS[1]}"
    read -r said <&"${USERD_PROCESS[0]}"
    [[ $said == ok* ]] || { echo "$*: $said" >&2; return 1; }
    said=${said#ok}
    userd_said=${said# }
}

# The service, its programs and settings, the ids of requests, and the end of its log.
userd_explain() {
    printf '%s at %s\n' "$("${USERD:-userd}" --version)" "$userd_url"
    grep -o 'PostgreSQL .*, programs in .*' "$userd_log" | head -n 1
    echo "settings: ${userd_settings:-defaults}"
    echo "request ids: $(grep -o 'request_id=[^ ]*' "$userd_log" | cut -d = -f 2 | tail -n 50 | paste -sd ' ')"
    echo "the last 50 lines of its log:"
    tail -n 50 "$userd_log"
}

userd_stop() {
    local input=${USERD_PROCESS[1]-} status=0 left=0
    # None are left of a service that has ended.
    if [ -n "$input" ] && userd_command faults; then left=$userd_said; fi
    [ -z "$input" ] || exec {input}>&-
    wait ${userd_pid:+"$userd_pid"} || status=$?
    [ $status = 0 ] || echo "userd ended with $status" >&2
    if [ $status = 0 ] && [ "$left" -gt 0 ]; then
        echo "$left requests were to fail, and have not come" >&2
        status=1
    fi
    # bats sets this where the test has passed.
    if [ $status != 0 ] || { [[ " ${FUNCNAME[*]} " == *" teardown "* ]] && [ -z "${BATS_TEST_COMPLETED-}" ]; }; then
        userd_explain >&2
    fi
    rm -f "$userd_log"
    return $status
}
