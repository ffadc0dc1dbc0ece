import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.google.protobuf.Duration;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.client.api.schema.GenericObject;
import org.apache.pulsar.client.api.schema.GenericRecord;
import org.apache.pulsar.client.api.transaction.Transaction;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;

/**
 * Pulsar's own client on both sides. `produce URL`: sends what each line of the input, a JSON object, describes, and
 * prints a line of JSON for each. `consume URL`: reads from each topic of the input so many messages as its line says,
 * and prints what an application sees of each. tests/support/clients/java_client.py has what the lines hold.
 */
public class Messages {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int MOST_IN_FLIGHT = 2_000;
    private static final int MORE_MILLIS = 300; // in which what is too many would come
    private static final Base64.Encoder BASE64 = Base64.getEncoder();

    /** A first version of what is sent with a schema, */
    public static class Order {
        public String item;
        public int amount;
    }

    /** and one with a further field, under the same name. */
    public static class Later {
        public static class Order {
            public String item;
            public int amount;
            public String note;
        }
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        boolean hasTransactions = arguments.length > 2;
        try (PulsarClient client =
                PulsarClient.builder().serviceUrl(arguments[1]).enableTransaction(hasTransactions).build()) {
            Sender sender = new Sender(client);
            for (String line = input.readLine(); line != null; line = input.readLine()) {
                if (arguments[0].equals("produce")) {
                    sender.take(JSON.readTree(line));
                } else {
                    consume(client, JSON.readTree(line));
                }
            }
            sender.finish();
        }
        System.exit(0);
    }

    private static synchronized void print(Map<String, Object> told) {
        try {
            System.out.println(JSON.writeValueAsString(told));
        } catch (Exception error) {
            System.out.println(error);
        }
    }

    private static Schema<?> schema(String name) {
        return switch (name) {
            case "BYTES" -> Schema.BYTES;
            case "STRING" -> Schema.STRING;
            case "INT32" -> Schema.INT32;
            case "BOOL" -> Schema.BOOL;
            case "JSON" -> Schema.JSON(Order.class);
            case "AVRO" -> Schema.AVRO(Order.class);
            case "AVRO2" -> Schema.AVRO(Later.Order.class);
            case "JSON2" -> Schema.JSON(Later.Order.class);
            case "PROTOBUF_NATIVE" -> Schema.PROTOBUF_NATIVE(Duration.class);
            case "KEY_VALUE" -> Schema.KeyValue(Schema.STRING, Schema.AVRO(Order.class), KeyValueEncodingType.INLINE);
            case "SEPARATED" -> Schema.KeyValue(Schema.STRING, Schema.STRING, KeyValueEncodingType.SEPARATED);
            case "AUTO" -> Schema.AUTO_CONSUME();
            default -> throw new IllegalArgumentException(name);
        };
    }

    /** What is sent with a schema that says `n`. */
    private static Object value(String schema, int n) {
        Order order = new Order();
        order.item = "item " + n;
        order.amount = n;
        Later.Order later = new Later.Order();
        later.item = "item " + n;
        later.amount = n;
        later.note = "note " + n;
        return switch (schema) {
            case "STRING" -> "text \u00fc " + n;
            case "INT32" -> n;
            case "BOOL" -> n % 2 == 0;
            case "JSON", "AVRO" -> order;
            case "AVRO2", "JSON2" -> later;
            case "PROTOBUF_NATIVE" -> Duration.newBuilder().setSeconds(n).build();
            case "KEY_VALUE" -> new KeyValue<>("key " + n, order);
            case "SEPARATED" -> new KeyValue<>("key " + n, "value " + n);
            default -> throw new IllegalArgumentException(schema);
        };
    }

    private static class Sender {
        private final PulsarClient client;
        private final Map<String, Producer<Object>> producers = new HashMap<>();
        private final Map<String, Transaction> transactions = new LinkedHashMap<>();
        private final Map<String, List<CompletableFuture<MessageId>>> sends = new HashMap<>(); // by transaction
        private final Semaphore inFlight = new Semaphore(MOST_IN_FLIGHT);

        Sender(PulsarClient client) {
            this.client = client;
        }

        /** Sends what a line describes, and prints its id when the broker has it. */
        void take(JsonNode line) throws Exception {
            if (line.has("end")) {
                end(line.get("end").asText());
                return;
            }
            inFlight.acquire();
            String name = line.path("name").asText();
            send(line).whenComplete((messageId, error) -> {
                inFlight.release();
                Map<String, Object> told = new LinkedHashMap<>();
                told.put("name", name);
                if (messageId instanceof MessageIdAdv id) {
                    told.put("id", id.getLedgerId() + ":" + id.getEntryId() + ":" + id.getPartitionIndex() + ":"
                            + id.getBatchIndex());
                } else {
                    told.put("error", String.valueOf(error));
                }
                print(told);
            });
        }

        /** Waits until the broker has all, and ends the transactions. */
        void finish() throws Exception {
            for (Producer<Object> producer : producers.values()) {
                producer.flush();
            }
            inFlight.acquire(MOST_IN_FLIGHT);
            for (String transaction : List.copyOf(transactions.keySet())) {
                end(transaction);
            }
        }

        /** Commits a transaction, or aborts it, and prints the error where that fails. */
        private void end(String name) throws Exception {
            Transaction transaction = transactions.remove(name);
            if (transaction == null) {
                return;
            }
            try {
                for (CompletableFuture<MessageId> send : sends.remove(name)) {
                    send.get();
                }
                (name.startsWith("commit") ? transaction.commit() : transaction.abort()).get();
            } catch (ExecutionException error) {
                print(Map.of("name", name, "error", String.valueOf(error.getCause())));
            }
        }

        @SuppressWarnings("unchecked")
        private CompletableFuture<MessageId> send(JsonNode line) throws Exception {
            String schema = line.path("schema").asText("BYTES");
            String settings = line.get("topic").asText() + schema + line.path("compression") + line.path("batch")
                    + line.path("chunk") + line.path("encrypted") + line.path("producer") + line.has("transaction");
            Producer<Object> producer = producers.get(settings);
            if (producer == null) {
                ProducerBuilder<Object> builder = (ProducerBuilder<Object>) client.newProducer(schema(schema));
                int batch = line.path("batch").asInt(0);
                builder.topic(line.get("topic").asText())
                        .compressionType(CompressionType.valueOf(line.path("compression").asText("NONE")))
                        .enableBatching(batch > 0)
                        .blockIfQueueFull(true)
                        .sendTimeout(0, TimeUnit.SECONDS) // what is not told to be sent is not there
                        .enableChunking(line.path("chunk").asInt(0) > 0);
                if (batch > 0) {
                    builder.batchingMaxMessages(batch).batchingMaxPublishDelay(200, TimeUnit.MILLISECONDS);
                }
                if (line.path("chunk").asInt(0) > 0) {
                    builder.chunkMaxMessageSize(line.get("chunk").asInt());
                }
                if (line.has("encrypted")) {
                    Map<String, String> keys = new HashMap<>();
                    line.get("encrypted").fields().forEachRemaining(k -> keys.put(k.getKey(), k.getValue().asText()));
                    keys.keySet().forEach(builder::addEncryptionKey);
                    builder.defaultCryptoKeyReader(keys);
                }
                producer = builder.create();
                producers.put(settings, producer);
            }
            TypedMessageBuilder<Object> message;
            if (line.has("transaction")) {
                String name = line.get("transaction").asText();
                if (!transactions.containsKey(name)) {
                    transactions.put(name, client.newTransaction().withTransactionTimeout(2, TimeUnit.MINUTES).build().get());
                }
                message = producer.newMessage(transactions.get(name));
            } else {
                message = producer.newMessage();
            }
            if (line.has("n")) {
                message.value(value(schema, line.get("n").asInt()));
            } else if (line.has("size")) {
                message.value(filled(line.get("size").asInt()));
            } else if (line.hasNonNull("payload")) {
                message.value(line.get("payload").binaryValue());
            } else {
                message.value(null);
            }
            if (line.hasNonNull("key")) {
                message.key(line.get("key").asText());
            }
            if (line.hasNonNull("key_bytes")) {
                message.keyBytes(line.get("key_bytes").binaryValue());
            }
            if (line.hasNonNull("ordering_key")) {
                message.orderingKey(line.get("ordering_key").binaryValue());
            }
            if (line.path("event_time").asLong(0) > 0) {
                message.eventTime(line.get("event_time").asLong());
            }
            if (line.has("deliver_at")) {
                message.deliverAt(line.get("deliver_at").asLong());
            }
            line.path("properties").fields().forEachRemaining(p -> message.property(p.getKey(), p.getValue().asText()));
            CompletableFuture<MessageId> sent = message.sendAsync();
            if (line.has("transaction")) {
                sends.computeIfAbsent(line.get("transaction").asText(), name -> new ArrayList<>()).add(sent);
            }
            return sent;
        }
    }

    /** Bytes that compress to a tenth or so, and of which a part is not like another. */
    private static byte[] filled(int size) {
        byte[] payload = new byte[size];
        for (int i = 0; i < size; i++) {
            payload[i] = (byte) (i * 31 + i / 251 + i / 65_521);
        }
        return payload;
    }

    private static void consume(PulsarClient client, JsonNode line) throws Exception {
        String topic = line.get("topic").asText();
        Schema<?> schema = schema(line.path("schema").asText("AUTO"));
        try (Consumer<?> consumer = client.newConsumer(schema)
                .topic(topic)
                .subscriptionName("java" + System.nanoTime())
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .subscribe()) {
            int left = line.get("n").asInt();
            while (true) {
                Message<?> message = consumer.receive(left-- > 0 ? 20_000 : MORE_MILLIS, TimeUnit.MILLISECONDS);
                if (message == null) {
                    break;
                }
                print(seen(topic, line.path("schema").asText("AUTO"), message));
                consumer.acknowledge(message);
            }
        }
    }

    private static Map<String, Object> seen(String topic, String as, Message<?> message) throws Exception {
        Map<String, Object> seen = new LinkedHashMap<>();
        byte[] payload = message.getData();
        seen.put("topic", topic);
        seen.put("as", as);
        seen.put("size", payload == null ? -1 : payload.length);
        seen.put("sha256", payload == null ? null : HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(payload)));
        seen.put("payload", payload == null || payload.length > 1000 ? null : BASE64.encodeToString(payload));
        seen.put("key", message.hasKey() ? message.getKey() : null);
        seen.put("key_is_base64", message.hasBase64EncodedKey());
        seen.put("key_bytes", message.hasKey() ? BASE64.encodeToString(message.getKeyBytes()) : null);
        seen.put("ordering_key", message.hasOrderingKey() ? BASE64.encodeToString(message.getOrderingKey()) : null);
        seen.put("properties", message.getProperties());
        seen.put("event_time", message.getEventTime());
        seen.put("publish_time", message.getPublishTime());
        seen.put("producer", message.getProducerName());
        seen.put("id", message.getMessageId().toString());
        seen.put("schema_version", message.getSchemaVersion() == null ? null : HexFormat.of().formatHex(message.getSchemaVersion()));
        try {
            Object value = message.getValue();
            seen.put("is_null", value == null);
            seen.put("value", shown(value));
        } catch (Exception error) {
            seen.put("error", error.toString());
        }
        return seen;
    }

    private static String shown(Object value) throws Exception {
        if (value instanceof GenericObject generic) {
            Object inner = generic.getNativeObject();
            return generic.getSchemaType() + " " + (inner == generic ? generic.getClass().getSimpleName() : shown(inner));
        }
        if (value instanceof KeyValue<?, ?> pair) {
            return shown(pair.getKey()) + " = " + shown(pair.getValue());
        }
        if (value instanceof Order || value instanceof Later.Order) {
            return JSON.writeValueAsString(value);
        }
        if (value instanceof byte[] bytes) {
            return bytes.length + " bytes";
        }
        return String.valueOf(value);
    }
}
