// A test with Go's standard library: userd test -- go test users_test.go
package users

import (
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"
)

// startUserd starts a service on a database of its own, which goes with the test. The order names settings and users.
func startUserd(t *testing.T, order string) string {
	t.Helper()
	var service struct{ URL, Control string }
	if status := ask(t, "POST", os.Getenv("USERD_CONTROL")+"/services", order, &service); status != 201 {
		t.Fatal(status)
	}
	t.Cleanup(func() { ask(t, "DELETE", service.Control, "", nil) })
	return service.URL
}

type user struct {
	ID, Name, Email string
}

func ask(t *testing.T, method, url, body string, into any) int {
	t.Helper()
	request, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if into != nil {
		if err := json.NewDecoder(answer.Body).Decode(into); err != nil {
			t.Fatal(err)
		}
	}
	return answer.StatusCode
}

func TestALife(t *testing.T) {
	t.Parallel()
	url := startUserd(t, `{}`)
	var created, read user
	ada := `{"name":"Ada Lovelace","email":"ada@example.com"}`
	if status := ask(t, "POST", url+"/users", ada, &created); status != 201 || created.Name != "Ada Lovelace" {
		t.Fatal(status, created)
	}
	if status := ask(t, "POST", url+"/users", ada, nil); status != 409 {
		t.Fatal(status)
	}
	if status := ask(t, "PUT", url+"/users/"+created.ID, `{"name":"Ada King"}`, nil); status != 200 {
		t.Fatal(status)
	}
	if status := ask(t, "GET", url+"/users/"+created.ID, "", &read); status != 200 || read.Name != "Ada King" {
		t.Fatal(status, read)
	}
	if status := ask(t, "DELETE", url+"/users/"+created.ID, "", nil); status != 204 {
		t.Fatal(status)
	}
	if status := ask(t, "GET", url+"/users/"+created.ID, "", nil); status != 404 {
		t.Fatal(status)
	}
}

func TestSettings(t *testing.T) {
	t.Parallel()
	url := startUserd(t, `{"settings":{"SCHEMA":"strict"}}`)
	if status := ask(t, "POST", url+"/users", `{"name":"Ada","email":"ada@example.com"}`, nil); status != 400 {
		t.Fatal(status)
	}
}
