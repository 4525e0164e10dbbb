# States, requests, failures and time on command: userd test -- bats faults.bats. Each test has a service of its own, so that
# `bats --jobs 4` runs them side by side.
control() { curl -fsS --noproxy '*' "$@"; }

setup() {
    service=$(control "$USERD_CONTROL/services" -d '{"settings":{"MAX_PER_PAGE":7}}')
    url=$(jq -r .url <<<"$service") control=$(jq -r .control <<<"$service")
}

teardown() {
    [ "$(control "$control/faults")" = '{"left":0}' ]
    # bats prints it if the test fails.
    control "$control/requests" | jq -c '.requests[-10:][]'
    control -X DELETE "$control"
}

create() {
    curl -s --noproxy '*' "$url/users" -d "{\"name\":\"$1\",\"email\":\"$1@example.com\"}" "${@:2}" | jq -r .id
}

@test "settings" {
    [ "$(curl -s --noproxy '*' "$url/users" | jq .perPage)" = 7 ]
}

@test "reset" {
    create ada
    control -X POST "$control/reset"
    [ "$(create ada)" = 1 ]
}

@test "save and restore" {
    create ada
    control -X PUT "$control/states/one_user"
    create grace
    control -X POST "$control/states/one_user"
    [ "$(create alan)" = 2 ]
}

@test "requests" {
    create ada -H 'Authorization: Bearer secret'
    run control "$control/requests?method=POST&path=/users"
    [ "$(jq -r '.requests[] | .body.name + .headers.authorization' <<<"$output")" = 'ada***' ]
}

@test "fail" {
    control "$control/faults" -d '{"fault":"answer-lost","method":"POST","path":"/users"}'
    [ -z "$(create ada -H 'Idempotency-Key: a-key')" ]
    [ "$(create ada -H 'Idempotency-Key: a-key')" = 1 ]
}

@test "advance" {
    create ada -H 'Idempotency-Key: a-key'
    control "$control/time" -d '{"advance":86400}'
    [ "$(create grace -H 'Idempotency-Key: a-key')" = 2 ]
}
