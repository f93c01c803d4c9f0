//! The tree of a Parquet column's types, and the encodings that can hold its values.

use parquet::basic::{ConvertedType, LogicalType, Repetition, TimeUnit, Type as PhysicalType};
use parquet::schema::types::Type;

use crate::shard::samples::{NumberKind, NumberType};

/// The meaning of a leaf's values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LeafKind {
    Bool,
    Number(NumberType),
    Text,
    Binary,
    Uuid,
    /// A decimal number with this many digits after the point.
    Decimal(usize),
    Date,
    /// A time of day in units of which a second has this many.
    Time(i64),
    /// A moment in such units, and whether it is in UTC.
    Timestamp(i64, bool),
    /// A type without values: every one is null.
    Null,
    /// A type that no encoding holds, by its name.
    Unsupported(&'static str),
}

/// A value within a column, with the definition and repetition levels that tell its structure.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    /// Below this definition level the value is null; `None` if it cannot be.
    pub(crate) null_below: Option<i16>,
    /// The leaf column that is read first.
    pub(crate) first: usize,
    pub(crate) shape: Shape,
}

/// The structure of a value.
#[derive(Clone, Debug)]
pub(crate) enum Shape {
    Leaf(LeafKind),
    Struct(Vec<(String, Node)>),
    /// Below definition level `empty_below` it has no elements; each further one has repetition level `rep`.
    List {
        element: Box<Node>,
        empty_below: i16,
        rep: i16,
    },
    /// The key and the value of an entry of a map, which is a list of them.
    Pair(Vec<Node>),
}

impl Node {
    /// Returns the numbers of the leaf columns.
    pub(crate) fn leaves(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.num_leaves()
    }

    fn num_leaves(&self) -> usize {
        match &self.shape {
            Shape::Leaf(_) => 1,
            Shape::Struct(fields) => fields.iter().map(|(_, field)| field.num_leaves()).sum(),
            Shape::List { element, .. } => element.num_leaves(),
            Shape::Pair(both) => both.iter().map(Self::num_leaves).sum(),
        }
    }

    /// Returns the kinds of the leaves in order.
    fn kinds(&self) -> Vec<&LeafKind> {
        match &self.shape {
            Shape::Leaf(kind) => vec![kind],
            Shape::Struct(fields) => fields.iter().flat_map(|(_, field)| field.kinds()).collect(),
            Shape::List { element, .. } => element.kinds(),
            Shape::Pair(both) => both.iter().flat_map(Self::kinds).collect(),
        }
    }

    /// Returns the type of the numbers in lists, however deeply nested; none for other values.
    pub(crate) fn list_number(&self) -> Option<NumberType> {
        let Shape::List { element, .. } = &self.shape else {
            return None;
        };
        match element.shape {
            Shape::Leaf(LeafKind::Number(number)) => Some(number),
            _ => element.list_number(),
        }
    }

    /// Returns the node of the bytes of a file as `datasets` stores it (`struct<bytes, path>`).
    pub(crate) fn file(&self) -> Option<&Node> {
        let Shape::Struct(fields) = &self.shape else {
            return None;
        };
        let find = |wanted: &str| fields.iter().find(|(name, _)| name == wanted);
        let (_, bytes) = find("bytes")?;
        let is_file = fields.len() == 2 && find("path").is_some();
        (is_file && matches!(bytes.shape, Shape::Leaf(LeafKind::Binary))).then_some(bytes)
    }

    /// Returns the encodings that can hold the values, the usual one first; a `*` stands for a shape. The error
    /// names a type within the column that no encoding holds.
    pub(crate) fn encodings(&self) -> Result<Vec<String>, &'static str> {
        let unsupported = self.kinds().into_iter().find_map(|kind| match kind {
            LeafKind::Unsupported(name) => Some(*name),
            _ => None,
        });
        if let Some(name) = unsupported {
            return Err(name);
        }
        let mut found: Vec<String> = match &self.shape {
            Shape::Leaf(LeafKind::Bool | LeafKind::Null) => vec![],
            Shape::Leaf(LeafKind::Number(number)) => {
                let own = number_name(*number);
                // Integers of 64 bits hold all but the largest ones without a sign.
                let is_int = number.kind == NumberKind::Signed
                    || number.kind == NumberKind::Unsigned && number.bytes < 8;
                let wider: &[&str] = match number.kind {
                    NumberKind::Float => &["float64"],
                    _ if is_int => &["int", "int64"],
                    _ => &[],
                };
                let wider = wider.iter().filter(|name| **name != own);
                std::iter::once(own.as_str())
                    .chain(wider.copied())
                    .map(str::to_owned)
                    .collect()
            }
            Shape::Leaf(LeafKind::Binary) => owned(&["bytes", "jpeg", "png"]),
            Shape::Leaf(LeafKind::Decimal(_)) => owned(&["str_decimal"]),
            Shape::Leaf(_) => owned(&["str"]),
            Shape::List { element, .. } if element.file().is_some() => {
                owned(&["json", "list[jpeg]", "list[png]"])
            }
            Shape::List { element, .. } => match self.list_number().map(number_name) {
                Some(name) if matches!(element.shape, Shape::Leaf(_)) => {
                    vec![format!("ndarray:{name}"), format!("ndarray:{name}:*")]
                }
                Some(name) => vec!["json".into(), format!("ndarray:{name}:*")],
                None => vec![],
            },
            Shape::Struct(_) if self.file().is_some() => owned(&["bytes", "jpeg", "png"]),
            Shape::Struct(_) | Shape::Pair(_) => vec![],
        };
        if !found.iter().any(|name| name == "json") {
            found.push("json".into());
        }
        Ok(found)
    }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Returns NumPy's name of a number type.
pub(crate) fn number_name(number: NumberType) -> String {
    let kind = match number.kind {
        NumberKind::Unsigned => "uint",
        NumberKind::Signed => "int",
        NumberKind::Float => "float",
    };
    format!("{kind}{}", 8 * number.bytes)
}

/// Returns the columns of a file's schema by name.
pub(crate) fn children(schema: &Type) -> Vec<(String, Node)> {
    let mut next = 0;
    let fields = schema.get_fields().iter();
    let fields = fields.map(|field| (field.name().to_owned(), build(field, 0, 0, &mut next)));
    fields.collect()
}

/// Returns the node of a type in a place with these levels; `next` is the number of the next leaf column.
fn build(kind: &Type, def: i16, rep: i16, next: &mut usize) -> Node {
    let info = kind.get_basic_info();
    match info.has_repetition().then(|| info.repetition()) {
        Some(Repetition::REPEATED) => {
            let first = *next;
            let element = Box::new(value(kind, def + 1, rep + 1, None, next));
            list(element, None, def + 1, rep + 1, first)
        }
        Some(Repetition::OPTIONAL) => value(kind, def + 1, rep, Some(def + 1), next),
        _ => value(kind, def, rep, None, next),
    }
}

fn list(
    element: Box<Node>,
    null_below: Option<i16>,
    empty_below: i16,
    rep: i16,
    first: usize,
) -> Node {
    Node {
        null_below,
        first,
        shape: Shape::List {
            element,
            empty_below,
            rep,
        },
    }
}

/// Returns the node of a value whose own level is `def`.
fn value(kind: &Type, def: i16, rep: i16, null_below: Option<i16>, next: &mut usize) -> Node {
    let first = *next;
    if kind.is_primitive() {
        *next += 1;
        let shape = Shape::Leaf(leaf_kind(kind));
        return Node {
            null_below,
            first,
            shape,
        };
    }
    let info = kind.get_basic_info();
    let is_list = matches!(info.logical_type_ref(), Some(LogicalType::List))
        || info.converted_type() == ConvertedType::LIST;
    let is_map = matches!(info.logical_type_ref(), Some(LogicalType::Map))
        || matches!(
            info.converted_type(),
            ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE
        );
    if let [entries] = kind.get_fields()
        && (is_list || is_map)
        && entries.get_basic_info().has_repetition()
        && entries.get_basic_info().repetition() == Repetition::REPEATED
    {
        let (def, rep) = (def + 1, rep + 1);
        let element = match entries.is_group().then(|| entries.get_fields()) {
            Some(both @ [_, _]) if is_map => {
                let both = both.iter().map(|field| build(field, def, rep, next));
                let shape = Shape::Pair(both.collect());
                Node {
                    null_below: None,
                    first,
                    shape,
                }
            }
            // Three levels, unless the names are those of older writers with two.
            Some([only]) if is_list && !is_element(kind, entries) => build(only, def, rep, next),
            _ => value(entries, def, rep, None, next),
        };
        return list(Box::new(element), null_below, def, rep, first);
    }
    let fields = kind.get_fields().iter();
    let fields = fields.map(|field| (field.name().to_owned(), build(field, def, rep, next)));
    let shape = Shape::Struct(fields.collect());
    Node {
        null_below,
        first,
        shape,
    }
}

/// Returns whether the repeated group of a list is the element itself, as older writers name it.
fn is_element(outer: &Type, entries: &Type) -> bool {
    entries.name() == "array" || entries.name() == format!("{}_tuple", outer.name())
}

fn leaf_kind(kind: &Type) -> LeafKind {
    let info = kind.get_basic_info();
    let (physical, converted) = (kind.get_physical_type(), info.converted_type());
    match info.logical_type_ref() {
        Some(LogicalType::Float16) => return number(NumberKind::Float, 2),
        Some(LogicalType::Uuid) => return LeafKind::Uuid,
        Some(LogicalType::Integer(int)) => {
            let kind = match int.is_signed {
                true => NumberKind::Signed,
                false => NumberKind::Unsigned,
            };
            return number(kind, usize::from(int.bit_width.unsigned_abs()) / 8);
        }
        Some(LogicalType::Decimal(decimal)) => return decimal_kind(decimal.scale),
        Some(LogicalType::Time(time)) => return LeafKind::Time(per_second(&time.unit)),
        Some(LogicalType::Timestamp(time)) => {
            return LeafKind::Timestamp(per_second(&time.unit), time.is_adjusted_to_u_t_c);
        }
        Some(LogicalType::Unknown) => return LeafKind::Null,
        Some(LogicalType::Variant(_)) => return LeafKind::Unsupported("variant"),
        Some(LogicalType::Bson) => return LeafKind::Binary,
        _ => {}
    }
    match (converted, physical) {
        (ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON, _) => LeafKind::Text,
        (ConvertedType::DECIMAL, _) => decimal_kind(kind.get_scale()),
        (ConvertedType::DATE, _) => LeafKind::Date,
        (ConvertedType::TIME_MILLIS, _) => LeafKind::Time(1_000),
        (ConvertedType::TIME_MICROS, _) => LeafKind::Time(1_000_000),
        (ConvertedType::TIMESTAMP_MILLIS, _) => LeafKind::Timestamp(1_000, true),
        (ConvertedType::TIMESTAMP_MICROS, _) => LeafKind::Timestamp(1_000_000, true),
        (ConvertedType::INTERVAL, _) => LeafKind::Unsupported("interval"),
        (ConvertedType::UINT_8, _) => number(NumberKind::Unsigned, 1),
        (ConvertedType::UINT_16, _) => number(NumberKind::Unsigned, 2),
        (ConvertedType::UINT_32, _) => number(NumberKind::Unsigned, 4),
        (ConvertedType::UINT_64, _) => number(NumberKind::Unsigned, 8),
        (ConvertedType::INT_8, _) => number(NumberKind::Signed, 1),
        (ConvertedType::INT_16, _) => number(NumberKind::Signed, 2),
        (_, PhysicalType::BOOLEAN) => LeafKind::Bool,
        (_, PhysicalType::INT32) => number(NumberKind::Signed, 4),
        (_, PhysicalType::INT64) => number(NumberKind::Signed, 8),
        (_, PhysicalType::FLOAT) => number(NumberKind::Float, 4),
        (_, PhysicalType::DOUBLE) => number(NumberKind::Float, 8),
        (_, PhysicalType::INT96) => LeafKind::Timestamp(1_000_000_000, false),
        (_, PhysicalType::BYTE_ARRAY | PhysicalType::FIXED_LEN_BYTE_ARRAY) => LeafKind::Binary,
    }
}

fn decimal_kind(scale: i32) -> LeafKind {
    match usize::try_from(scale) {
        Ok(scale) => LeafKind::Decimal(scale),
        Err(_) => LeafKind::Unsupported("decimal with a negative scale"),
    }
}

fn number(kind: NumberKind, bytes: usize) -> LeafKind {
    LeafKind::Number(NumberType { kind, bytes })
}

fn per_second(unit: &TimeUnit) -> i64 {
    match unit {
        TimeUnit::MILLIS => 1_000,
        TimeUnit::MICROS => 1_000_000,
        TimeUnit::NANOS => 1_000_000_000,
    }
}
