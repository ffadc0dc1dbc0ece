"""The route that returns the message id of an index, with the path and codes of Pulsar's admin API."""

from __future__ import annotations

from deltalake.exceptions import TableNotFoundError
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from admin.errors import AdminError
from admin.rest.request_bodies import BadRequestError, parse_index
from admin.rest.target_topic import TargetTopic
from admin.rest.topics_schema import (
    INDEX_RESPONSES,
    INDEX_TEXT,
    TOPIC_PATH,
    Authoritative,
    Index,
    MessageIdOfIndex,
    Reader,
)
from warehouse.queries.message_index import IndexNotRecordedError, MessageIndex, NoSuchIndexError, PartitionedTopicError

router = APIRouter()


@router.get(
    TOPIC_PATH + "/getMessageIdByIndex",
    summary="The id of the message with an index",
    description=INDEX_TEXT,
    response_model=MessageIdOfIndex,
    responses=INDEX_RESPONSES,
)
def get_message_id_by_index(
    request: Request, role: Reader, target: TargetTopic, index: Index = None, authoritative: Authoritative = None
) -> Response:
    message_index: MessageIndex = request.app.state.message_index
    try:
        found = message_index.find(target.route.source, target.partition, parse_index(index))
    except NoSuchIndexError as error:
        target.refuse_whole(request.app.state.control)
        raise AdminError(404, str(error)) from error
    except BadRequestError as error:
        raise AdminError(404, str(error)) from error
    except PartitionedTopicError as error:
        raise AdminError(405, str(error)) from error
    except IndexNotRecordedError as error:
        raise AdminError(412, str(error)) from error
    except TableNotFoundError as error:
        raise AdminError(503, "there is no table of entries: the job has not run yet") from error
    return JSONResponse({"ledgerId": found.ledger_id, "entryId": found.entry_id, "partitionIndex": found.partition})
