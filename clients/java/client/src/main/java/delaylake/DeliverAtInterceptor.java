package delaylake;

import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.interceptor.ProducerInterceptor;
import org.apache.pulsar.client.impl.MessageImpl;
import org.apache.pulsar.common.api.proto.KeyValue;
import org.apache.pulsar.common.api.proto.MessageMetadata;

/**
 * Hands what a producer delays by Pulsar's own {@code deliverAt} or {@code deliverAfter} to delaylake: the time becomes the
 * property {@code deliverAt}, and the broker no longer sees one. A producer changes one line:
 *
 * <pre>client.newProducer().topic("orders").intercept(new DeliverAtInterceptor()).create()</pre>
 *
 * A message that has the property {@code deliverAt} or {@code deliverAfter} already keeps it. Messages without a time are
 * left alone. Thread-safe; one can serve many producers.
 *
 * Pulsar has no public way to change a message here, so it is changed as the client's own code does, tested with Pulsar's
 * client 4.2. Its names are the same in the shaded client.
 */
@SuppressWarnings("rawtypes") // as the interface has them
public class DeliverAtInterceptor implements ProducerInterceptor {
    private static final String DELIVER_AT = "deliverAt";
    private static final String DELIVER_AFTER = "deliverAfter";

    @Override
    public boolean eligible(Message message) {
        return message instanceof MessageImpl;
    }

    @Override
    public Message beforeSend(Producer producer, Message message) {
        // Not by the message's properties: it keeps a copy of them once they have been asked for.
        MessageMetadata metadata = ((MessageImpl) message).getMessageBuilder();
        if (metadata.hasDeliverAtTime()) {
            if (!hasTime(metadata)) {
                metadata.addProperty().setKey(DELIVER_AT).setValue(Long.toString(metadata.getDeliverAtTime()));
            }
            metadata.clearDeliverAtTime();
        }
        return message;
    }

    @Override
    public void onSendAcknowledgement(Producer producer, Message message, MessageId id, Throwable error) {}

    @Override
    public void close() {}

    private static boolean hasTime(MessageMetadata metadata) {
        for (KeyValue property : metadata.getPropertiesList()) {
            if (property.getKey().equals(DELIVER_AT) || property.getKey().equals(DELIVER_AFTER)) {
                return true;
            }
        }
        return false;
    }
}
