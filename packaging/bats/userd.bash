# For tests with bats: `load userd`, or `bats_load_library userd` where a package has installed it. Then
#
#     setup() { userd_start; }    # "$userd_url" is a service on a fresh database
#     teardown() { userd_stop; }  # fails the test where the service has ended badly, and explains a failure of the test
#
# USERD names the program. userd_start takes settings and then arguments of the program: `userd_start SCHEMA=strict --seed
# users.csv`. `userd_reset`, `userd_save NAME`, `userd_restore NAME`, `userd_fail answer-lost POST /users 1` (or `10%`),
# `userd_chance SEED` and `userd_advance 61` are commands to it; `userd_requests [POST /users]` prints a line of JSON for each
# request that it was sent. A test fails that leaves faults. Its variables in the environment have no effect, but for
# POSTGRES_BIN.

# A test may replace commands, by functions or by another PATH, and IFS.
userd_path=$PATH

userd_start() {
    local PATH=$userd_path IFS=$' \t\n'
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
    # Subshells do not get the descriptors of a coprocess; they open this shell's by their names.
    userd_output=/proc/$BASHPID/fd/${USERD_PROCESS[0]} userd_input=/proc/$BASHPID/fd/${USERD_PROCESS[1]}
    userd_seed=
    # listening on http://127.0.0.1:41234
    if ! read -r _ _ userd_url <&"${USERD_PROCESS[0]}"; then
        echo "userd did not start" >&2
        cat "$userd_log" >&2
        return 1
    fi
}

userd_reset() { userd_command reset; }
userd_save() { userd_command save "$@"; }
userd_restore() { userd_command restore "$@"; }
userd_advance() { userd_command advance "$@"; }
userd_chance() { userd_command chance "$@" && userd_seed=$1; }
userd_fail() {
    [[ "$*" != *% || $userd_seed ]] || userd_chance "$RANDOM" || return 1
    userd_command fail "$@"
}
userd_requests() {
    local PATH=$userd_path IFS=$' \t\n'
    # Their number, and how many have gone for newer ones.
    userd_command requests "$@" && command head -n "${userd_said% *}" <"$userd_output"
}

# Sends a line to the service, whose answer is `ok`, with $userd_said behind it, or fails.
userd_command() {
    local IFS=$' \t\n' said
    echo "$*" >"$userd_input"
    read -r said <"$userd_output"
    [[ $said == ok* ]] || { echo "$*: $said" >&2; return 1; }
    said=${said#ok}
    userd_said=${said# }
}

# The service, its programs and settings, the ids of requests, and the end of its log.
userd_explain() {
    printf '%s at %s\n' "$("${USERD:-userd}" --version)" "$userd_url"
    command grep -o 'PostgreSQL .*, programs in .*' "$userd_log" | command head -n 1
    echo "settings: ${userd_settings:-defaults}"
    echo "request ids: $(command grep -o 'request_id=[^ ]*' "$userd_log" | command cut -d = -f 2 | command tail -n 50 | command paste -sd ' ')"
    [ -z "$userd_seed" ] || echo "chance seed: $userd_seed"
    echo "the last 10 requests:"
    command tail -n 10 "$userd_log.requests"
    echo "the last 50 lines of its log:"
    command tail -n 50 "$userd_log"
}

userd_stop() {
    local PATH=$userd_path IFS=$' \t\n'
    local input=${USERD_PROCESS[1]-} status=0 left=0
    # None are left of a service that has ended.
    if [ -n "$input" ] && userd_command faults; then left=$userd_said; fi
    : >"$userd_log.requests"
    [ -z "$input" ] || userd_requests >"$userd_log.requests" || true
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
    command rm -f "$userd_log" "$userd_log.requests"
    return $status
}
