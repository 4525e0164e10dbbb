# States, requests, failures and time on command: bats faults.bats, beside userd.bash.
load userd
setup() { userd_start; }
teardown() { userd_stop; }

create() { curl -s "$userd_url/users" -d "{\"name\":\"$1\",\"email\":\"$1@example.com\"}" "${@:2}" | jq -r .id; }

@test "reset" {
    create ada
    userd_reset
    [ "$(create ada)" = 1 ]
}

@test "save and restore" {
    create ada
    userd_save one_user
    create grace
    userd_restore one_user
    [ "$(create alan)" = 2 ]
}

@test "requests" {
    create ada -H 'Authorization: Bearer secret'
    [ "$(userd_requests POST /users | jq -r .body.name)" = ada ]
    [ "$(userd_requests | jq -r .headers.authorization)" = "***" ]
}

@test "fail by chance" {
    userd_chance 1
    userd_fail 503 POST /users 50%
    for n in 1 2 3 4 5 6 7 8 9 10; do create "user$n"; done
    userd_fail none
    [ "$(create ada)" -gt 1 ]
    [ "$(curl -s "$userd_url/users" | jq .total)" -lt 11 ]
}

@test "several users by id" {
    create ada && create grace && create alan
    [ "$(curl -s "$userd_url/users?id=3&id=1&id=9" | jq -c '[.data[].name]')" = '["ada","alan"]' ]
}

@test "fail" {
    userd_fail answer-lost POST /users
    [ -z "$(create ada -H 'Idempotency-Key: a-key')" ]
    [ "$(create ada -H 'Idempotency-Key: a-key')" = 1 ]
}

@test "advance" {
    create ada -H 'Idempotency-Key: a-key'
    userd_advance 86400
    [ "$(create grace -H 'Idempotency-Key: a-key')" = 2 ]
}
