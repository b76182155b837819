"""From the files of each part of a dataset to rows in our types, one function a part.

Every row of the files comes out, with `fault` (why it can't be used, null if it can), CORRUPT and SOURCE, and
the text of ids that were hashed (user_text, ...), null for integer ids.
"""

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType

from jobs.common import ingest_fields as fields
from jobs.common.datasets import Dataset, IdType, ItemColumns, ItemsPart, LabelsPart, Time
from jobs.common.errors import UserError
from jobs.common.ingest_fields import Value
from jobs.common.ingest_read import CORRUPT, SOURCE, dtype, evaluate

LABEL = "label "  # a space: no name of a column of ours
ITEM = "item "
ITEM_VALUES = ("category_id", "categories", "advertiser_id", "created_at", "bid", "features")
ITEM_TEXTS = ("category_text", "categories_text", "advertiser_text")


def log_rows(source: DataFrame, dataset: Dataset, name: str) -> DataFrame:
    """ranking_log's columns, fault, user_text, item_text; ITEM_VALUES and ITEM_TEXTS if the log has the items."""
    part, ids = dataset.log, dataset.ids
    how = part.time or dataset.time
    given = {key: expression for key, expression in part.columns.model_dump().items() if expression}
    labels = {LABEL + key: expression for key, expression in part.labels.items()}
    from_log = (
        _item_expressions(dataset.items.columns) if dataset.items and not isinstance(dataset.items, ItemsPart) else {}
    )
    rows = evaluate(source, {**given, **labels, **from_log}, name)
    user, user_text = _id(rows, "user_id", ids.user)
    item, item_text = _id(rows, "item_id", ids.item)
    event_time = fields.time(F.col("event_time"), dtype(rows, "event_time"), how, "event_time")
    shown = fields.flag(F.col("shown"), dtype(rows, "shown"), "shown")
    clicked = fields.flag(F.col("clicked"), dtype(rows, "clicked"), "clicked")
    values: dict[str, Value] = {
        "event_time": event_time,
        "user_id": user,
        "item_id": item,
        "shown": shown,
        "clicked": clicked,
    }
    if "arrived_at" in given:
        source_time = F.col("arrived_at")
        values["arrived_at"] = fields.time(source_time, dtype(rows, "arrived_at"), how, "arrived_at").optional(
            source_time
        )
    else:
        values["arrived_at"] = _fixed(F.lit(None).cast("timestamp"))
    if "request_id" in given:
        values["request_id"] = fields.text(F.col("request_id"), dtype(rows, "request_id"), "request_id")
    else:
        values["request_id"] = _fixed(F.concat_ws("-", user.value, F.unix_micros(event_time.value)))
    group = F.trim(F.col("user_group").cast("string")) if "user_group" in given else F.lit(None).cast("string")
    values["user_group"] = _fixed(F.when(group != "", group))
    if "position" in given:
        position = fields.number(F.col("position"), dtype(rows, "position"), "position", "int").optional(
            F.col("position")
        )
        negative = F.when(position.value < 0, F.lit("position is negative")).otherwise(position.fault)
        values["position"] = Value(position.value, negative)
    else:
        values["position"] = _fixed(F.lit(None).cast("int"))
    if "served_embedding" in given:
        vector, kind = F.col("served_embedding"), dtype(rows, "served_embedding")
        values["served_embedding"] = fields.vector(vector, kind, "served_embedding")
    else:
        values["served_embedding"] = _fixed(F.lit(None).cast("binary"))
    surface = F.coalesce(F.col("surface").cast("string"), F.lit("unknown")) if "surface" in given else F.lit("unknown")
    values["surface"] = _fixed(surface)
    values["clicked but not shown"] = Value(
        F.lit(None), F.when(clicked.value & ~shown.value, F.lit("clicked but not shown"))
    )
    label_values = {
        key: fields.number(F.col(f"`{LABEL + key}`"), dtype(rows, LABEL + key), f"label {key}").optional(
            F.col(f"`{LABEL + key}`")
        )
        for key in part.labels
    }
    item_values, texts = _item_values(rows, from_log, dataset, how)
    everything = [*values.values(), *label_values.values(), *item_values.values()]
    columns = {key: value.value for key, value in {**values, **item_values}.items() if key != "clicked but not shown"}
    return rows.select(
        *[column.alias(key) for key, column in columns.items()],
        _labels(label_values).alias("labels"),
        user_text.alias("user_text"),
        item_text.alias("item_text"),
        *[column.alias(key) for key, column in texts.items()],
        _fault_of(everything).alias("fault"),
        CORRUPT,
        SOURCE,
    )


def item_rows(source: DataFrame, part: ItemsPart, dataset: Dataset, name: str) -> DataFrame:
    """item_id, ITEM_VALUES, item_text, ITEM_TEXTS, fault."""
    expressions = {"item_id": part.columns.item_id, **_item_expressions(part.columns)}
    rows = evaluate(source, expressions, name)
    item, item_text = _id(rows, "item_id", dataset.ids.item)
    values, texts = _item_values(rows, expressions, dataset, part.time or dataset.time)
    return rows.select(
        item.value.alias("item_id"),
        *[value.value.alias(key) for key, value in values.items()],
        item_text.alias("item_text"),
        *[column.alias(key) for key, column in texts.items()],
        _fault_of([item, *values.values()]).alias("fault"),
        CORRUPT,
        SOURCE,
    )


def label_rows(source: DataFrame, part: LabelsPart, dataset: Dataset, name: str) -> DataFrame:
    """label_events' columns with occurred_at as event_time, item_text, fault."""
    rows = evaluate(source, {key: text for key, text in part.columns.model_dump().items() if text}, name)
    how = part.time or dataset.time
    item, item_text = _id(rows, "item_id", dataset.ids.item)
    arrived_at = _fixed(F.lit(None).cast("timestamp"))
    if part.columns.arrived_at:
        column = F.col("arrived_at")
        arrived_at = fields.time(column, dtype(rows, "arrived_at"), how, "arrived_at").optional(column)
    values = {
        "request_id": fields.text(F.col("request_id"), dtype(rows, "request_id"), "request_id"),
        "item_id": item,
        "label": fields.text(F.col("label"), dtype(rows, "label"), "label"),
        "event_time": fields.time(F.col("occurred_at"), dtype(rows, "occurred_at"), how, "occurred_at"),
        "arrived_at": arrived_at,
        "value": fields.number(F.col("value"), dtype(rows, "value"), "value"),
    }
    return rows.select(
        *[value.value.alias(key) for key, value in values.items()],
        item_text.alias("item_text"),
        _fault_of(list(values.values())).alias("fault"),
        CORRUPT,
        SOURCE,
    )


def id_texts(rows: DataFrame, kinds: Mapping[str, tuple[str, str]]) -> DataFrame:
    """kind, id, original of hashed ids. kinds: kind -> (id column, text column), of those that rows have; arrays hold
    categories."""
    entries = []
    kinds = {kind: columns for kind, columns in kinds.items() if set(columns) <= set(rows.columns)}
    for kind, (value, original) in kinds.items():
        if isinstance(rows.schema[original].dataType, ArrayType):
            entries.append(
                F.transform(
                    F.arrays_zip(F.col(value).alias("id"), F.col(original).alias("original")),
                    lambda pair: _entry("category", pair["id"], pair["original"]),
                )
            )
        else:
            entries.append(F.array(_entry(kind, F.col(value), F.col(original))))
    found = rows.select(F.explode(F.concat(*entries)).alias("entry")).select("entry.*")
    return found.where("original IS NOT NULL").distinct()


def _entry(kind: str, value: Column, original: Column) -> Column:
    return F.struct(F.lit(kind).alias("kind"), value.alias("id"), original.alias("original"))


def _id(rows: DataFrame, column: str, kind: IdType) -> tuple[Value, Column]:
    source = F.col(f"`{column}`")
    if kind == "integer":
        return fields.integer_id(source, dtype(rows, column), column.strip()), F.lit(None).cast("string")
    value = fields.string_id(source, dtype(rows, column), column)
    return value, F.when(value.value.isNotNull(), source.cast("string"))


def _item_expressions(columns: ItemColumns) -> dict[str, str]:
    given = {key: text for key, text in columns.model_dump().items() if text and key not in ("item_id", "features")}
    features = columns.features
    if features:
        given["features"] = features if isinstance(features, str) else f"array({', '.join(features)})"
    return {ITEM + key: text for key, text in given.items()}


def _item_values(
    rows: DataFrame, given: Mapping[str, str], dataset: Dataset, how: Time
) -> tuple[dict[str, Value], dict[str, Column]]:
    """The values of ITEM_VALUES and the texts of ITEM_TEXTS, null for what the mapping does not give."""
    if not given:
        return {}, {}
    no_text = F.lit(None).cast("string")
    no_texts = F.lit(None).cast("array<string>")
    values = {
        "category_id": _fixed(F.lit(None).cast("bigint")),
        "categories": _fixed(F.lit(None).cast("array<bigint>")),
        "advertiser_id": _fixed(F.lit(None).cast("bigint")),
        "created_at": _fixed(F.lit(None).cast("timestamp")),
        "bid": _fixed(F.lit(None).cast("double")),
        "features": _fixed(F.lit(None).cast("array<float>")),
    }
    texts = {"category_text": no_text, "categories_text": no_texts, "advertiser_text": no_text}

    def has(key: str) -> bool:
        return ITEM + key in given

    def column(key: str) -> Column:
        return F.col(f"`{ITEM}{key}`")

    if has("categories"):
        kind = dtype(rows, ITEM + "categories")
        if not isinstance(kind, ArrayType):
            raise UserError(
                f"items.columns.categories is {kind.simpleString()}, must be an array; use split(...) or array(...)"
            )
        values["categories"], texts["categories_text"] = _categories(column("categories"), dataset.ids.category)
        values["category_id"] = _fixed(F.try_element_at(values["categories"].value, F.lit(1)))
    targets = (
        ("category", "category_id", dataset.ids.category),
        ("advertiser", "advertiser_id", dataset.ids.advertiser),
    )
    for key, target, id_type in targets:
        if has(key):
            value, texts[f"{key}_text"] = _id(rows, ITEM + key, id_type)
            values[target] = value.optional(column(key))
    if has("created_at"):
        source = column("created_at")
        values["created_at"] = fields.time(source, dtype(rows, ITEM + "created_at"), how, "created_at").optional(source)
    if has("bid"):
        values["bid"] = fields.number(column("bid"), dtype(rows, ITEM + "bid"), "bid").optional(column("bid"))
    if has("features"):
        source = column("features")
        value = fields.numbers(source, dtype(rows, ITEM + "features"), "features")
        values["features"] = Value(value.value, F.when(source.isNotNull(), value.fault))
    return values, texts


def _categories(source: Column, kind: IdType) -> tuple[Value, Column]:
    words = F.filter(F.transform(source, lambda element: F.trim(element.cast("string"))), lambda element: element != "")
    if kind == "string":
        return _fixed(F.transform(words, lambda word: F.xxhash64(word))), words
    ids = F.transform(words, lambda element: element.try_cast("bigint"))
    fault = F.when(
        F.exists(ids, lambda element: element.isNull()),
        F.lit("categories holds something that is not a 64-bit integer"),
    )
    return Value(ids, fault), F.lit(None).cast("array<string>")


def _labels(values: Mapping[str, Value]) -> Column:
    """MAP<STRING, DOUBLE> of the labels that are known; null if the mapping declares none."""
    if not values:
        return F.lit(None).cast("map<string,double>")
    pairs = [part for key, value in values.items() for part in (F.lit(key), value.value)]
    return F.map_filter(F.create_map(*pairs), lambda _, value: value.isNotNull())


def _fixed(value: Column) -> Value:
    return Value(value, F.lit(None).cast("string"))


def _fault_of(values: list[Value]) -> Column:
    faults = fields.all_faults(*[value.fault for value in values])
    return F.when(F.col(CORRUPT).isNotNull(), F.lit("malformed record")).otherwise(faults)
