import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.client.impl.TypedMessageBuilderImpl;

/**
 * Publishes as a replicator would. Arguments: URL, topic, the producer's name, and for each message the cluster in which it
 * was published (none: this one), `=`, and its payload.
 */
public class Replicated {
    public static void main(String[] arguments) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build();
                Producer<byte[]> producer = client.newProducer().topic(arguments[1]).producerName(arguments[2])
                        .enableBatching(false).create()) {
            for (int i = 3; i < arguments.length; i++) {
                String[] parts = arguments[i].split("=", 2);
                TypedMessageBuilder<byte[]> message = producer.newMessage().value(parts[1].getBytes());
                if (!parts[0].isEmpty()) {
                    ((TypedMessageBuilderImpl<byte[]>) message).getMetadataBuilder().setReplicatedFrom(parts[0]);
                }
                message.property("deliverAt", "1").send();
            }
        }
    }
}
