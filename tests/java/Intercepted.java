import delaylake.DeliverAtInterceptor;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;

/**
 * Delays messages by Pulsar's own means, with the interceptor and one without. Arguments: URL, topic, a time, ms since the
 * epoch. Each payload says how the message was delayed.
 */
public class Intercepted {
    public static void main(String[] arguments) throws Exception {
        String topic = arguments[1];
        long at = Long.parseLong(arguments[2]);
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            ProducerBuilder<String> builder = client.newProducer(Schema.STRING).topic(topic);
            try (Producer<String> plain = builder.clone().create()) {
                plain.newMessage().value("native").deliverAt(at).send();
            }
            try (Producer<String> producer = builder.intercept(new DeliverAtInterceptor()).create()) {
                producer.newMessage().value("at").property("region", "eu").deliverAt(at).send();
                producer.newMessage().value("after").deliverAfter(1, TimeUnit.HOURS).send();
                producer.newMessage().value("both").property("deliverAt", "" + (at + 1)).deliverAt(at).send();
                producer.newMessage().value("none").send();
                producer.newMessage().value("batched 1").deliverAt(at).sendAsync();
                producer.newMessage().value("batched 2").deliverAt(at).sendAsync();
                producer.flush();
            }
        }
    }
}
