// Package delaylake schedules messages with delaylake, and cancels, moves and lists what waits, over its admin API.
// It is an example to copy: the standard library is enough.
package delaylake

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Client calls the admin API at URL, as http://127.0.0.1:8081.
type Client struct {
	URL     string
	Token   string        // of Pulsar; empty: none
	Timeout time.Duration // for a call with all its repetitions; 0: 30 s
}

// Outcome is what a command did to a message of one subscription.
type Outcome struct {
	Subscription string `json:"subscription"`
	Result       string `json:"result"`
	Reason       string `json:"reason"`
}

// Error is a call that was refused, or not answered.
type Error struct {
	Kind      string // TooLate, NotFound, NotAllowed, Invalid, Forbidden, Gone, Unavailable, NoAnswer or DelayLakeError
	Reason    string
	RequestID string // with which the same call can be repeated
	Outcomes  []Outcome
}

func (e *Error) Error() string { return e.Kind + ": " + e.Reason }

// Message is one that is to be delivered later; times are ms since the epoch.
type Message struct {
	Payload      any               `json:"payload"` // a text is sent as UTF-8, other values as JSON
	Key          string            `json:"key,omitempty"`
	Properties   map[string]string `json:"properties,omitempty"`
	DeliverAt    int64             `json:"deliverAt,omitempty"`
	DeliverAfter int64             `json:"deliverAfter,omitempty"` // ms
	ExpireAt     int64             `json:"expireAt,omitempty"`     // from then on it is not sent
	ExpireAfter  int64             `json:"expireAfter,omitempty"`  // ms after it is due
	ScheduleKey  string            `json:"scheduleKey,omitempty"`
	Repeat       string            `json:"repeat,omitempty"`
	TimeZone     string            `json:"timeZone,omitempty"`
	RequestID    string            `json:"-"` // empty: one of its own
}

// Scheduled is a message's id, ledger:entry:partition:batchIndex, and its time, ms since the epoch.
type Scheduled struct {
	MessageID string `json:"messageId"`
	DeliverAt int64  `json:"deliverAt"`
}

// Waiting is a message that is not delivered yet; times are ms since the epoch, 0: there is none.
type Waiting struct {
	MessageID     string   `json:"messageId"`
	DeliverAt     int64    `json:"deliverAt"`
	ExpiresAt     int64    `json:"expiresAt"`
	Subscriptions []string `json:"subscriptions"`
}

// State has the subscriptions to which a message will go, and those for which it was cancelled, and can be restored.
type State struct {
	WaitingFor   []string
	CancelledFor []string
}

// Redriven has the numbers of dead letters that matched, and that will be delivered once more.
type Redriven struct {
	Matched         int `json:"matched"`
	Redriven        int `json:"redriven"`
	AlreadyRedriven int `json:"alreadyRedriven"`
	Refused         int `json:"refused"`
	Unreadable      int `json:"unreadable"`
}

// Schedule sends a message that is delivered later.
func (c Client) Schedule(ctx context.Context, topic string, message Message) (Scheduled, error) {
	var made Scheduled
	err := c.call(ctx, "POST", topicPath(topic)+"/delayed", chosen(message.RequestID), message, &made)
	return made, err
}

// Cancel cancels a message, on a subscription of any type; it may come before its message.
func (c Client) Cancel(ctx context.Context, topic string, message Scheduled, subscription, requestID string) ([]Outcome, error) {
	id := strings.Split(message.MessageID, ":")
	body := map[string]any{"ledgerId": id[0], "entryId": id[1], "deliverAt": message.DeliverAt, "subscriptionNames": []string{subscription}}
	return c.outcomes(ctx, "POST", partition(topicPath(topic), message.MessageID)+"/cancelDelayedMessage", requestID, body, "WAITING")
}

// CancelKey cancels the message that waits under a schedule key.
func (c Client) CancelKey(ctx context.Context, topic, key, subscription, requestID string) ([]Outcome, error) {
	body := map[string]any{"scheduleKey": key, "subscriptionNames": []string{subscription}}
	return c.outcomes(ctx, "POST", topicPath(topic)+"/cancelDelayedMessage", requestID, body)
}

// Do sends another command about a message, by its id, or by its schedule key as "key:order-7". The operation is that of
// the path: reschedule {deliverAt}, postpone {byMillis}, deliverNow, restore, skipByMessageIds, retry {reason}.
func (c Client) Do(ctx context.Context, operation, topic, message, subscription, requestID string, fields map[string]any) ([]Outcome, error) {
	path := topicPath(topic)
	body := map[string]any{}
	for name, value := range fields {
		body[name] = value
	}
	if key, isKey := strings.CutPrefix(message, "key:"); isKey {
		body["scheduleKeys"] = []string{key}
	} else {
		path = partition(path, message)
		body["messageIds"] = []string{inTopic(message)}
	}
	path += "/subscription/" + url.PathEscape(subscription) + "/" + operation
	if len(fields) == 0 && body["messageIds"] != nil { // in an object they would be base64
		return c.outcomes(ctx, "POST", path, requestID, body["messageIds"])
	}
	return c.outcomes(ctx, "POST", path, requestID, body)
}

// Pause parks what comes due for a subscription; Resume has it delivered.
func (c Client) Pause(ctx context.Context, topic, subscription, requestID string) ([]Outcome, error) {
	return c.outcomes(ctx, "POST", topicPath(topic)+"/subscription/"+url.PathEscape(subscription)+"/pause", requestID, nil)
}

// Resume ends the pause of a subscription.
func (c Client) Resume(ctx context.Context, topic, subscription, requestID string) ([]Outcome, error) {
	return c.outcomes(ctx, "POST", topicPath(topic)+"/subscription/"+url.PathEscape(subscription)+"/resume", requestID, nil)
}

// EndSchedule ends a message that recurs.
func (c Client) EndSchedule(ctx context.Context, topic, message, subscription, requestID string) ([]Outcome, error) {
	return c.outcomes(ctx, "DELETE", schedulePath(topic, message, "", subscription), requestID, nil, "WAITING")
}

// DoSchedule sends another command about a message that recurs, named as for Do: skipNext, pause or resume. Without a
// subscription it is for all that the topic has.
func (c Client) DoSchedule(ctx context.Context, operation, topic, message, subscription, requestID string) ([]Outcome, error) {
	return c.outcomes(ctx, "POST", schedulePath(topic, message, operation, subscription), requestID, nil)
}

// Pending returns what waits, soonest first; Schedules what recurs. The query has subscription, key, property, limit, ...
func (c Client) Pending(ctx context.Context, topic string, query url.Values) ([]Waiting, error) {
	var page struct{ Messages []Waiting }
	err := c.call(ctx, "GET", topicPath(topic)+"/delayed?"+query.Encode(), "", nil, &page)
	return page.Messages, err
}

// Get returns the state of an entry that is one message; NotFound: it does not wait, or has only just come.
func (c Client) Get(ctx context.Context, topic, message string) (State, error) {
	found := State{[]string{}, []string{}}
	id := strings.Split(message, ":")
	query := url.Values{"ledgerId": {id[0]}, "entryId": {id[1]}, "dueFrom": {"0"}}
	for state, names := range map[string]*[]string{"waiting": &found.WaitingFor, "cancelled": &found.CancelledFor} {
		query.Set("state", state)
		messages, err := c.Pending(ctx, topic, query)
		if err != nil {
			return found, err
		}
		for _, one := range messages { // once for each time at which it is due
			*names = append(*names, one.Subscriptions...)
		}
	}
	if len(found.WaitingFor)+len(found.CancelledFor) == 0 {
		return found, &Error{Kind: "NotFound", Reason: message + " does not wait, or has only just come"}
	}
	return found, nil
}

// Redrive has the dead letters of a subscription delivered once more that match a filter, or with isDryRun counts them.
// The filter has subscription, and key, properties, messageIds, reason, ...
func (c Client) Redrive(ctx context.Context, topic string, filter map[string]any, isDryRun bool, requestID string) (Redriven, error) {
	var found Redriven
	body := map[string]any{"filter": filter, "dryRun": isDryRun}
	err := c.call(ctx, "POST", topicPath(topic)+"/dlq/redrive", chosen(requestID), body, &found)
	return found, err
}

// Schedules returns the messages that recur, in the order in which they came.
func (c Client) Schedules(ctx context.Context, topic string) ([]string, error) {
	var page struct{ Schedules []struct{ ID string } }
	if err := c.call(ctx, "GET", topicPath(topic)+"/schedules", "", nil, &page); err != nil {
		return nil, err
	}
	ids := []string{}
	for _, one := range page.Schedules {
		ids = append(ids, one.ID)
	}
	return ids, nil
}

func (c Client) outcomes(ctx context.Context, method, path, requestID string, body any, done ...string) ([]Outcome, error) {
	var answer struct{ Outcomes []Outcome }
	requestID = chosen(requestID)
	err := c.call(ctx, method, path, requestID, body, &answer)
	var failed *Error
	if err != nil && !errors.As(err, &failed) {
		return nil, err
	}
	outcomes := answer.Outcomes
	if failed != nil {
		outcomes = failed.Outcomes
	}
	isDone := map[string]bool{"APPLIED": true, "ALREADY_APPLIED": true}
	for _, result := range done {
		isDone[result] = true
	}
	// Of several outcomes the error is that of the gravest.
	for _, one := range [][2]string{{"INVALID", "Invalid"}, {"NOT_ALLOWED", "NotAllowed"}, {"TOO_LATE", "TooLate"}, {"NOT_FOUND", "NotFound"}} {
		for _, outcome := range outcomes {
			if outcome.Result == one[0] && !isDone[outcome.Result] {
				return outcomes, &Error{one[1], outcome.Subscription + " " + outcome.Result + " " + outcome.Reason, requestID, outcomes}
			}
		}
	}
	return outcomes, err
}

var kinds = map[int]string{
	400: "Invalid", 401: "Forbidden", 403: "Forbidden", 404: "NotFound", 405: "NotAllowed", 410: "Gone", 412: "Invalid",
	413: "Invalid", 421: "Invalid", 422: "Invalid", 429: "Unavailable", 502: "NoAnswer", 503: "Unavailable", 504: "NoAnswer",
}

// call makes a call, and repeats it under its request id until it is answered, its time is over, or ctx is done.
func (c Client) call(caller context.Context, method, path, requestID string, body, found any) error {
	timeout := c.Timeout
	if timeout == 0 {
		timeout = 30 * time.Second
	}
	ctx, cancel := context.WithTimeout(caller, timeout)
	defer cancel()
	request, err := c.request(ctx, method, path, requestID, body)
	if err != nil {
		return err
	}
	pause, mayBeDone := 100*time.Millisecond, false
	for {
		status, content, wait, err := attempt(request)
		if err != nil && caller.Err() != nil {
			return caller.Err()
		}
		kind := kinds[status]
		if err == nil && status < 300 {
			return json.Unmarshal(content, found)
		}
		answer := struct {
			Reason   string
			Outcomes []Outcome
		}{Reason: fmt.Sprint(status)}
		if err == nil {
			_ = json.Unmarshal(content, &answer)
			if kind != "Unavailable" && kind != "NoAnswer" {
				if kind == "" {
					kind = "DelayLakeError"
				}
				return &Error{kind, answer.Reason, requestID, answer.Outcomes}
			}
		} else {
			answer.Reason = err.Error()
		}
		var dial *net.OpError
		wasNotSent := errors.As(err, &dial) && dial.Op == "dial"
		mayBeDone = mayBeDone || kind == "NoAnswer" || (err != nil && !wasNotSent)
		wait = max(wait, time.Duration((0.5+mathrand.Float64()/2)*float64(pause)))
		deadline, _ := ctx.Deadline()
		if time.Until(deadline) < wait+timeout/10 {
			if mayBeDone {
				return &Error{"NoAnswer", answer.Reason, requestID, nil}
			}
			return &Error{"Unavailable", answer.Reason, requestID, nil}
		}
		pause = min(2*pause, 3*time.Second)
		select {
		case <-caller.Done():
			return caller.Err()
		case <-time.After(wait):
		}
	}
}

func (c Client) request(ctx context.Context, method, path, requestID string, body any) (*http.Request, error) {
	var reader io.Reader
	if body != nil {
		content, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		reader = bytes.NewReader(content)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.URL+path, reader)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Prefer", "return=representation")
	if requestID != "" {
		request.Header.Set("Idempotency-Key", requestID)
	}
	if c.Token != "" {
		request.Header.Set("Authorization", "Bearer "+c.Token)
	}
	return request, nil
}

func attempt(request *http.Request) (int, []byte, time.Duration, error) {
	request = request.Clone(request.Context())
	if request.GetBody != nil {
		request.Body, _ = request.GetBody() // anew from its bytes
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil, 0, err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	seconds, _ := strconv.Atoi(response.Header.Get("Retry-After"))
	return response.StatusCode, content, time.Duration(seconds) * time.Second, err
}

func chosen(requestID string) string {
	if requestID != "" {
		return requestID
	}
	id := make([]byte, 16)
	_, _ = rand.Read(id)
	return fmt.Sprintf("%x", id)
}

// topicPath returns the path of a topic's calls: orders is persistent://public/default/orders.
func topicPath(topic string) string {
	topic = strings.TrimPrefix(topic, "persistent://")
	if !strings.Contains(topic, "/") {
		topic = "public/default/" + topic
	}
	parts := strings.SplitN(topic, "/", 3)
	for i, part := range parts {
		parts[i] = url.PathEscape(part)
	}
	return "/admin/v2/persistent/" + strings.Join(parts, "/")
}

// schedulePath returns the path of a call about a message that recurs, named as for Do.
func schedulePath(topic, message, operation, subscription string) string {
	query, path := url.Values{}, topicPath(topic)
	if key, isKey := strings.CutPrefix(message, "key:"); isKey {
		query.Set("scheduleKey", key)
		path += "/schedules"
	} else {
		path = partition(path, message) + "/schedules/" + inTopic(message)
	}
	if subscription != "" {
		query.Set("subscriptionNames", subscription)
	}
	if operation != "" {
		path += "/" + operation
	}
	return path + "?" + query.Encode()
}

// partition returns a path with the partition that a message's id names.
func partition(path, message string) string {
	if parts := strings.Split(message, ":"); len(parts) == 4 && parts[2] != "-1" {
		return path + "-partition-" + parts[2]
	}
	return path
}

// inTopic returns a message's id in the topic or partition that the path names.
func inTopic(message string) string {
	parts := strings.Split(message, ":")
	if len(parts) == 4 && parts[3] != "-1" {
		return parts[0] + ":" + parts[1] + ":" + parts[3]
	}
	return parts[0] + ":" + parts[1]
}
