package delaylake

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// answering returns a client of a server that gives these answers in turn, and the bodies that it gets.
func answering(t *testing.T, answers ...http.HandlerFunc) (Client, *[]string) {
	bodies := []string{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		bodies = append(bodies, string(body))
		answers[min(len(bodies), len(answers))-1](w, r)
	}))
	t.Cleanup(server.Close)
	return Client{URL: server.URL}, &bodies
}

// answer is one with a status, after which the next attempt would be so many seconds later.
func answer(status int, content, retryAfter string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Retry-After", retryAfter)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, content)
	}
}

func TestACallIsRepeatedWithItsBody(t *testing.T) {
	lake, bodies := answering(t, answer(503, "{}", "0"), answer(201, `{"messageId":"7:0:-1:-1","deliverAt":5}`, "0"))
	made, err := lake.Schedule(context.Background(), "orders", Message{Payload: "x", DeliverAfter: 1})
	if err != nil || made != (Scheduled{"7:0:-1:-1", 5}) {
		t.Fatal(made, err)
	}
	if len(*bodies) != 2 || (*bodies)[0] == "" || (*bodies)[0] != (*bodies)[1] {
		t.Fatal(*bodies)
	}
}

func TestWhenItsTimeIsOverTheErrorSaysWhetherItMayBeDone(t *testing.T) {
	for status, kind := range map[int]string{502: "NoAnswer", 504: "NoAnswer", 503: "Unavailable", 429: "Unavailable"} {
		lake, _ := answering(t, answer(status, "{}", "60"))
		_, err := lake.Do(context.Background(), "deliverNow", "orders", "7:0", "*", "", nil)
		var failed *Error
		if !errors.As(err, &failed) || failed.Kind != kind || failed.RequestID == "" {
			t.Fatal(status, err)
		}
	}
}

func TestAnOutcomesErrorHasTheRequestID(t *testing.T) {
	lake, _ := answering(t, answer(404, `{"reason":"no","outcomes":[{"subscription":"a","result":"NOT_FOUND","reason":"no"}]}`, "0"))
	_, err := lake.Do(context.Background(), "deliverNow", "orders", "7:0", "*", "", nil)
	var failed *Error
	if !errors.As(err, &failed) || failed.Kind != "NotFound" || failed.RequestID == "" {
		t.Fatal(err)
	}
}

func TestAContextEndsTheWait(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	lake, _ := answering(t, func(w http.ResponseWriter, r *http.Request) {
		time.AfterFunc(50*time.Millisecond, cancel)
		answer(503, "{}", "20")(w, r)
	})
	began := time.Now()
	_, err := lake.Do(ctx, "deliverNow", "orders", "7:0", "*", "", nil)
	if !errors.Is(err, context.Canceled) || time.Since(began) > 15*time.Second {
		t.Fatal(err, time.Since(began))
	}
}

func TestWhatIsNoJSONIsNotRepeated(t *testing.T) {
	lake, bodies := answering(t, answer(500, "{}", "0"))
	_, err := lake.Schedule(context.Background(), "orders", Message{Payload: make(chan int), DeliverAfter: 1})
	var failed *Error
	if err == nil || errors.As(err, &failed) || len(*bodies) != 0 {
		t.Fatal(err, *bodies)
	}
}
