// Pulsar's Go client on both sides. `produce URL`: sends what each line of the input, a JSON object, describes, and
// prints a line of JSON for each. `consume URL`: reads from each topic of the input so many messages as its line says,
// and prints what an application sees of each. tests/support/clients/go_client.py has what the lines hold.
package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/crypto"
	"github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/sirupsen/logrus"
)

const avroOrder = `{"type":"record","name":"Order","fields":[{"name":"item","type":"string"},{"name":"amount","type":"int"}]}`

const receiveSeconds = 20

// An Order is what is sent with the schemas JSON and AVRO.
type Order struct {
	Item   string `json:"item" avro:"item"`
	Amount int    `json:"amount" avro:"amount"`
}

// A Line is what the input says of a message.
type Line struct {
	Name, Topic         string
	Payload, Key        []byte
	OrderingKey         []byte `json:"ordering_key"`
	Properties          map[string]string
	EventTime           int64 `json:"event_time"`
	DeliverAt           int64 `json:"deliver_at"`
	DeliverAfter        int64 `json:"deliver_after"`
	Compression, Schema string
	Size, N, Batch      int
	ByKey               bool `json:"by_key"`
	Chunk               uint
	Encrypted           string
}

var (
	output       sync.Mutex
	compressions = map[string]pulsar.CompressionType{
		"": pulsar.NoCompression, "LZ4": pulsar.LZ4, "ZLIB": pulsar.ZLib, "ZSTD": pulsar.ZSTD, "SNAPPY": pulsar.SNAPPY,
	}
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func tell(told map[string]any) {
	text, err := json.Marshal(told)
	check(err)
	output.Lock()
	defer output.Unlock()
	fmt.Println(string(text))
}

func main() {
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: os.Args[2], Logger: log.NewLoggerWithLogrus(logger)})
	check(err)
	defer client.Close()
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(nil, 1<<24)
	sender := sender{client: client, producers: map[string]pulsar.Producer{}}
	for input.Scan() {
		var line Line
		check(json.Unmarshal(input.Bytes(), &line))
		if os.Args[1] == "produce" {
			sender.send(line)
		} else {
			consume(client, line)
		}
	}
	check(input.Err())
	sender.finish()
}

type sender struct {
	client    pulsar.Client
	producers map[string]pulsar.Producer
	sends     sync.WaitGroup
}

func (s *sender) producer(line Line) pulsar.Producer {
	settings := fmt.Sprint(line.Topic, line.Compression, line.Schema, line.Batch, line.ByKey, line.Chunk, line.Encrypted)
	if producer, ok := s.producers[settings]; ok {
		return producer
	}
	options := pulsar.ProducerOptions{
		Topic:                   line.Topic,
		CompressionType:         compressions[line.Compression],
		DisableBatching:         line.Batch == 0,
		BatchingMaxMessages:     uint(line.Batch),
		BatchingMaxPublishDelay: 200 * time.Millisecond,
		EnableChunking:          line.Chunk > 0,
		ChunkMaxMessageSize:     line.Chunk,
		Schema:                  schema(line.Schema),
	}
	if line.ByKey {
		options.BatcherBuilderType = pulsar.KeyBasedBatchBuilder
	}
	if line.Encrypted != "" {
		options.Encryption = &pulsar.ProducerEncryptionInfo{
			KeyReader: crypto.NewFileKeyReader(line.Encrypted, ""), Keys: []string{"the key"},
		}
	}
	producer, err := s.client.CreateProducer(options)
	check(err)
	s.producers[settings] = producer
	return producer
}

func (s *sender) send(line Line) {
	message := pulsar.ProducerMessage{
		Key: string(line.Key), OrderingKey: string(line.OrderingKey), Properties: line.Properties,
		DeliverAfter: time.Duration(line.DeliverAfter) * time.Millisecond,
	}
	switch {
	case line.Schema != "":
		message.Value = value(line.Schema, line.N)
	case line.Size > 0:
		message.Payload = filled(line.Size)
	default:
		message.Payload = line.Payload
	}
	if line.EventTime > 0 {
		message.EventTime = time.UnixMilli(line.EventTime)
	}
	if line.DeliverAt > 0 {
		message.DeliverAt = time.UnixMilli(line.DeliverAt)
	}
	s.sends.Add(1)
	s.producer(line).SendAsync(context.Background(), &message, func(id pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
		defer s.sends.Done()
		if err != nil {
			tell(map[string]any{"name": line.Name, "error": err.Error()})
			return
		}
		text := fmt.Sprintf("%d:%d:%d:%d", id.LedgerID(), id.EntryID(), id.PartitionIdx(), id.BatchIdx())
		tell(map[string]any{"name": line.Name, "id": text})
	})
}

func (s *sender) finish() {
	for _, producer := range s.producers {
		check(producer.Flush())
	}
	s.sends.Wait()
	for _, producer := range s.producers {
		producer.Close()
	}
}

func schema(name string) pulsar.Schema {
	switch name {
	case "STRING":
		return pulsar.NewStringSchema(nil)
	case "INT32":
		return pulsar.NewInt32Schema(nil)
	case "DOUBLE":
		return pulsar.NewDoubleSchema(nil)
	case "JSON":
		return pulsar.NewJSONSchema(avroOrder, nil)
	case "AVRO":
		return pulsar.NewAvroSchema(avroOrder, nil)
	}
	return nil
}

func value(schema string, n int) any {
	switch schema {
	case "STRING":
		return fmt.Sprintf("text ü %d", n)
	case "INT32":
		return int32(n)
	case "DOUBLE":
		return float64(n) / 4
	}
	return &Order{fmt.Sprintf("item %d", n), n}
}

// Bytes that compress to a tenth or so, and of which a part is not like another.
func filled(size int) []byte {
	payload := make([]byte, size)
	for i := range payload {
		payload[i] = byte(i*31 + i/251 + i/65_521)
	}
	return payload
}

func consume(client pulsar.Client, line Line) {
	consumer, err := client.Subscribe(pulsar.ConsumerOptions{
		Topic: line.Topic, SubscriptionName: fmt.Sprintf("go%d", time.Now().UnixNano()), Schema: schema(line.Schema),
		SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
	})
	check(err)
	defer consumer.Close()
	for left := line.N; ; left-- {
		wait := 300 * time.Millisecond // in which what is too many would come
		if left > 0 {
			wait = receiveSeconds * time.Second
		}
		within, cancel := context.WithTimeout(context.Background(), wait)
		message, err := consumer.Receive(within)
		cancel()
		if err != nil {
			return
		}
		tell(seen(line, message))
	}
}

func seen(line Line, message pulsar.Message) map[string]any {
	sum := sha256.Sum256(message.Payload())
	told := map[string]any{
		"topic": line.Topic, "as": line.Schema,
		"size": len(message.Payload()), "sha256": hex.EncodeToString(sum[:]),
		"key": []byte(message.Key()), "ordering_key": []byte(message.OrderingKey()),
		"properties": message.Properties(), "publish_time": message.PublishTime().UnixMilli(),
		"schema_version": hex.EncodeToString(message.SchemaVersion()), "event_time": 0,
	}
	if !message.EventTime().IsZero() {
		told["event_time"] = message.EventTime().UnixMilli()
	}
	var err error
	switch line.Schema {
	case "STRING":
		var text *string
		err = message.GetSchemaValue(&text)
		if err == nil {
			told["value"] = *text
		}
	case "INT32":
		var number int32
		err = message.GetSchemaValue(&number)
		told["value"] = number
	case "DOUBLE":
		var number float64
		err = message.GetSchemaValue(&number)
		told["value"] = number
	case "JSON", "AVRO":
		var order Order
		err = message.GetSchemaValue(&order)
		told["value"] = order
	}
	if err != nil {
		told["error"] = err.Error()
	}
	return told
}
