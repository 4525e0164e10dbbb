# The helper as a test of somebody's uses it: bats packaging/bats/userd.bats

load userd

# What the machine of somebody's sets, conda for one.
export HOST=x86_64-conda-linux-gnu PORT=1 API_TOKEN=theirs SCHEMA=strict DATABASE_URL=postgres://192.0.2.1/theirs

setup() { userd_start; }
teardown() { userd_stop; }

create() {
    curl -s -o /dev/null -w '%{http_code}' "$userd_url/users" -d '{"name":"Ada","email":"ada@example.com"}'
}

@test "a user" {
    run curl -s "$userd_url/users" -d '{"name":"Ada","email":"ada@example.com"}'
    [[ $output == '{"id":"1","name":"Ada"'* ]]
    run curl -s -o /dev/null -w '%{http_code}' "$userd_url/users/1"
    [ "$output" = 200 ]
}

@test "another test, another database" {
    run curl -s -o /dev/null -w '%{http_code}' "$userd_url/users/1"
    [ "$output" = 404 ]
}

@test "settings and arguments" {
    userd_stop
    userd_start SCHEMA=strict MAX_PER_PAGE=7 --host localhost
    [[ $userd_url == http://127.0.0.1:* || $userd_url == http://\[::1]:* ]]
    [ "$(create)" = 400 ]
    run curl -s "$userd_url/users"
    [[ $output == *'"perPage":7,'* ]]
}

@test "a service that ends badly fails its test" {
    kill -9 "$userd_pid"
    status=0
    userd_stop || status=$?
    [ $status = 137 ]
    userd_start
}

@test "faults that are left fail their test" {
    userd_fail 503 GET /users 2
    [ "$(curl -s -o /dev/null -w '%{http_code}' "$userd_url/users")" = 503 ]
    ! userd_fail nothing GET /users
    status=0
    userd_stop 2>"$BATS_TEST_TMPDIR/said" || status=$?
    [ $status = 1 ]
    grep -qx '1 requests were to fail, and have not come' "$BATS_TEST_TMPDIR/said"
    userd_start
}

@test "commands in subshells" {
    create
    userd_save one
    run userd_reset
    [ "$status" = 0 ]
    [ "$(create)" = 201 ]
    [ "$(userd_requests POST /users | jq -r .body.name)" = Ada ]
    run userd_restore two
    [ "$status" = 1 ]
    run userd_requests GET /nowhere
    [ "$status$output" = 0 ]
}

@test "commands that a test has replaced" {
    userd_stop
    userd_start
    sed 's/^test_/@test /' >"$BATS_TEST_TMPDIR/replaces.bats" <<EOF
load $PWD/packaging/bats/userd
setup() { userd_start; }
teardown() { userd_stop; }
replace() {
    grep() { return 1; }
    tail() { return 1; }
    rm() { return 1; }
    PATH=/nowhere IFS=,
    userd_fail 503 GET /users 0
}
test_"fails" {
    replace
    false
}
test_"passes" { replace; }
EOF
    run env -u BATS_TEST_COMPLETED bats "$BATS_TEST_TMPDIR/replaces.bats"
    [[ $output == *"not ok 1 fails"*"PostgreSQL "*", programs in /"*"the last 50 lines of its log:"*"stopped"* ]]
    [[ $output == *"ok 2 passes"* && $output != *"not ok 2"* && $output != *"not found"* ]]
}

@test "a failure is explained" {
    userd_stop
    userd_start
    # bats takes a line that begins with its word for a test of this file.
    sed 's/^test_/@test /' >"$BATS_TEST_TMPDIR/fails.bats" <<EOF
load $PWD/packaging/bats/userd
setup() { userd_start SCHEMA=strict API_TOKEN=a-secret-of-sixteen; }
teardown() { userd_stop; }
test_"fails" {
    userd_chance 7
    curl -s -o /dev/null -D - "\$userd_url/openapi.json" | sed -n 's/^X-Request-Id: /asked /p'
    false
}
test_"passes" { true; }
EOF
    run env -u BATS_TEST_COMPLETED bats "$BATS_TEST_TMPDIR/fails.bats"
    [ "$status" = 1 ]
    id=$(sed -n 's/^# asked \([^[:space:]]*\).*/\1/p' <<<"$output")
    [[ $output == *"request ids: $id"* ]]
    [[ $output == *"PostgreSQL "*", programs in /"* ]]
    [[ $output == *"settings: SCHEMA=strict API_TOKEN=***"* ]]
    [[ $output == *"GET /openapi.json 200"* ]]
    [[ $output == *'"target":"/openapi.json"}'* ]]
    [[ $output == *"chance seed: 7"* ]]
    [[ $output != *a-secret-of-sixteen* ]]
    [ "$(grep -c 'settings: ' <<<"$output")" = 1 ]
}
