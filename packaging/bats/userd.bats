# The helper as a test of somebody's uses it: bats packaging/bats/userd.bats

load userd

setup() { userd_start; }
teardown() { userd_stop; }

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
