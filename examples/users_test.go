// A test with Go's standard library: go test users_test.go. USERD names the program.
package users

import (
	"bufio"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// startUserd starts a service on a fresh database, which goes with the test, or with this process, however it ends.
func startUserd(t *testing.T, settings ...string) string {
	t.Helper()
	program := os.Getenv("USERD")
	if program == "" {
		program = "userd"
	}
	command := exec.Command(program, "--embedded", "--ephemeral", "--port=0", "--with-parent",
		"--with-parent="+strconv.Itoa(os.Getpid()))
	// No variable of the environment that it might take for a setting: HOST, for one, which conda sets.
	command.Env = append([]string{"PATH=" + os.Getenv("PATH"), "POSTGRES_BIN=" + os.Getenv("POSTGRES_BIN")}, settings...)
	var log strings.Builder
	command.Stderr = &log
	input, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		input.Close()
		if err := command.Wait(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Log(log.String())
		}
	})
	line, _ := bufio.NewReader(output).ReadString('\n')
	url := strings.TrimPrefix(strings.TrimSpace(line), "listening on ")
	if !strings.HasPrefix(url, "http") {
		t.Fatal("userd did not start")
	}
	return url
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
	url := startUserd(t)
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
	url := startUserd(t, "SCHEMA=strict")
	if status := ask(t, "POST", url+"/users", `{"name":"Ada","email":"ada@example.com"}`, nil); status != 400 {
		t.Fatal(status)
	}
}
