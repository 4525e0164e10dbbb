# Reset, failures and time on command: bats faults.bats, beside userd.bash.
load userd
setup() { userd_start; }
teardown() { userd_stop; }

create() { curl -s "$userd_url/users" -d "{\"name\":\"$1\",\"email\":\"$1@example.com\"}" "${@:2}" | jq -r .id; }

@test "reset" {
    create ada
    userd_reset
    [ "$(create ada)" = 1 ]
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
