package delaylake

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// step is one of clients/contract.json, which all clients pass on a running service.
type step struct {
	Title, Do, Topic, Payload, RequestID, Message, ScheduleKey, Subscription, Reason, Key, Repeat, TimeZone, Token string
	As, SameAs, Error, Until                                                                                       string
	AfterMillis, ByMillis, DueInMillis, ExpireAfterMillis, ExpireAt, ExpiresAfterMillis, ExpiresAt                 int64
	Limit                                                                                                          int
	Properties, Outcomes                                                                                           map[string]string
	Listed, WaitingFor, CancelledFor, Messages                                                                     *[]string
	Redriven                                                                                                       *struct{ Matched, Redriven int }
	DryRun                                                                                                         bool
}

var messages = map[string]Scheduled{}

func TestTheStepsThatAllClientsPass(t *testing.T) {
	if os.Getenv("DELAYLAKE_URL") == "" {
		t.Skip("DELAYLAKE_URL names no service")
	}
	content, err := os.ReadFile("../../../clients/contract.json")
	if err != nil {
		t.Fatal(err)
	}
	var steps []step
	if err := json.Unmarshal(content, &steps); err != nil {
		t.Fatal(err)
	}
	for _, one := range steps {
		check(t, one)
	}
}

// check does a step; until what it waits for is listed.
func check(t *testing.T, one step) {
	for deadline := time.Now().Add(150 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		made, outcomes, found, err := do(one)
		kind := ""
		var failed *Error
		if errors.As(err, &failed) {
			kind, outcomes = failed.Kind, failed.Outcomes
		} else if err != nil {
			t.Fatalf("%s: %v", one.Title, err)
		}
		if one.Until == "seen" && kind == "NotFound" && time.Now().Before(deadline) {
			continue
		}
		if kind != one.Error {
			t.Fatalf("%s: %v", one.Title, err)
		}
		if wanted := wanted(one); wanted != nil && !reflect.DeepEqual(found, wanted) {
			if time.Now().Before(deadline) && (one.Redriven == nil || one.DryRun) {
				continue
			}
			t.Fatalf("%s: %v, not %v", one.Title, found, wanted)
		}
		results := map[string]string{}
		for _, outcome := range outcomes {
			results[outcome.Subscription] = outcome.Result
		}
		if one.Outcomes != nil && !reflect.DeepEqual(results, one.Outcomes) {
			t.Fatalf("%s: %v", one.Title, results)
		}
		if one.SameAs != "" && made != messages[one.SameAs] {
			t.Fatalf("%s: %v, not %v", one.Title, made, messages[one.SameAs])
		}
		if one.As != "" {
			messages[one.As] = made
		}
		return
	}
}

// wanted returns what a step finds, at last; nil: anything.
func wanted(one step) any {
	switch {
	case one.Listed != nil:
		ids := []string{}
		for _, name := range *one.Listed {
			ids = append(ids, ended(messages[name].MessageID, one.ExpiresAt+one.ExpiresAfterMillis))
		}
		return ids
	case one.WaitingFor != nil:
		return [][]string{*one.WaitingFor, *one.CancelledFor}
	case one.Redriven != nil:
		return []int{one.Redriven.Matched, one.Redriven.Redriven}
	}
	return nil
}

// ended is a message's id with its end, if a step names one.
func ended(id string, end int64) string {
	if end == 0 {
		return id
	}
	return id + " until " + strconv.FormatInt(end, 10)
}

func do(one step) (made Scheduled, outcomes []Outcome, found any, err error) {
	ctx := context.Background()
	lake := Client{URL: os.Getenv("DELAYLAKE_URL"), Token: os.Getenv("DELAYLAKE_TOKEN"), Timeout: 150 * time.Second}
	if one.Token != "" {
		lake.Token = one.Token
	}
	topic := os.Getenv("DELAYLAKE_TOPIC")
	if one.Topic != "" {
		topic += "_" + one.Topic
	}
	requestID := one.RequestID
	if requestID != "" {
		requestID = "go-" + requestID
	}
	subscription := one.Subscription
	if subscription == "" {
		subscription = "*"
	}
	message, isKnown := messages[one.Message]
	if !isKnown {
		message = Scheduled{one.Message, time.Now().UnixMilli() + one.DueInMillis}
	}
	id := message.MessageID
	if one.ScheduleKey != "" {
		id = "key:" + one.ScheduleKey
	}
	fields := map[string]any{}
	switch one.Do {
	case "schedule":
		made, err = lake.Schedule(ctx, topic, Message{
			Payload: one.Payload, Key: one.Key, Properties: one.Properties, DeliverAfter: one.AfterMillis,
			ExpireAt: one.ExpireAt, ExpireAfter: one.ExpireAfterMillis, ScheduleKey: one.ScheduleKey, Repeat: one.Repeat, TimeZone: one.TimeZone, RequestID: requestID,
		})
		return
	case "cancel":
		if one.ScheduleKey != "" {
			outcomes, err = lake.CancelKey(ctx, topic, one.ScheduleKey, subscription, requestID)
		} else {
			outcomes, err = lake.Cancel(ctx, topic, message, subscription, requestID)
		}
		return
	case "endSchedule":
		outcomes, err = lake.EndSchedule(ctx, topic, id, subscription, requestID)
		return
	case "pending":
		query := url.Values{}
		if one.Subscription != "" {
			query.Set("subscription", one.Subscription)
		}
		if one.Key != "" {
			query.Set("key", one.Key)
		}
		if one.Limit > 0 {
			query.Set("limit", strconv.Itoa(one.Limit))
		}
		for name, value := range one.Properties {
			query.Add("property", name+"="+value)
		}
		var listed []Waiting
		listed, err = lake.Pending(ctx, topic, query)
		ids := []string{}
		for _, message := range listed {
			end := int64(0)
			if one.ExpiresAt > 0 {
				end = message.ExpiresAt
			} else if one.ExpiresAfterMillis > 0 {
				end = message.ExpiresAt - message.DeliverAt
			}
			ids = append(ids, ended(message.MessageID, end))
		}
		found = ids
		return
	case "schedules":
		found, err = lake.Schedules(ctx, topic)
		return
	case "skipNext":
		outcomes, err = lake.DoSchedule(ctx, "skipNext", topic, id, one.Subscription, requestID)
		return
	case "pauseSchedule":
		outcomes, err = lake.DoSchedule(ctx, "pause", topic, id, one.Subscription, requestID)
		return
	case "resumeSchedule":
		outcomes, err = lake.DoSchedule(ctx, "resume", topic, id, one.Subscription, requestID)
		return
	case "pause":
		outcomes, err = lake.Pause(ctx, topic, subscription, requestID)
		return
	case "resume":
		outcomes, err = lake.Resume(ctx, topic, subscription, requestID)
		return
	case "get":
		var state State
		state, err = lake.Get(ctx, topic, id)
		slices.Sort(state.WaitingFor)
		slices.Sort(state.CancelledFor)
		found = [][]string{state.WaitingFor, state.CancelledFor}
		return
	case "redrive":
		filter := map[string]any{"subscription": subscription}
		if one.Key != "" {
			filter["key"] = one.Key
		}
		if one.Reason != "" {
			filter["reason"] = one.Reason
		}
		if one.Messages != nil {
			ids := []string{}
			for _, name := range *one.Messages {
				parts := strings.Split(messages[name].MessageID, ":")
				ids = append(ids, strings.Join([]string{parts[0], parts[1], parts[3]}, ":"))
			}
			filter["messageIds"] = ids
		}
		var redriven Redriven
		redriven, err = lake.Redrive(ctx, topic, filter, one.DryRun, requestID)
		found = []int{redriven.Matched, redriven.Redriven}
		return
	case "reschedule":
		fields["deliverAt"] = time.Now().UnixMilli() + one.AfterMillis
	case "postpone":
		fields["byMillis"] = one.ByMillis
	case "retry":
		fields["reason"] = one.Reason
	}
	operation := map[string]string{"skip": "skipByMessageIds"}[one.Do]
	if operation == "" {
		operation = one.Do
	}
	outcomes, err = lake.Do(ctx, operation, topic, id, subscription, requestID, fields)
	return
}
