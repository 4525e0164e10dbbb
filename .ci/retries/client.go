// Creates a user for each line of standard input, with net/http.
package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

func main() {
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		key, body, _ := strings.Cut(lines.Text(), " ")
		request, _ := http.NewRequest("POST", os.Args[1], strings.NewReader(body))
		if key != "-" {
			request.Header.Set("Idempotency-Key", key)
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			fmt.Println(0)
			continue
		}
		io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
		fmt.Println(answer.StatusCode)
	}
}
