//! Structs that kernels take by value, laid out as C++ lays them out.

/// A struct on both sides of a launch. `tests/cuda.rs` holds it to the one in the unit's text.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StructLayout {
    /// The unit that declares it.
    pub unit: &'static str,
    /// Its name there.
    pub name: &'static str,
    /// Bytes of it.
    pub size: usize,
    /// What its address is a multiple of.
    pub align: usize,
    /// Name, offset and size of every field, in order.
    pub fields: &'static [(&'static str, usize, usize)],
}

/// Declares a struct of numbers and how it is laid out: `LAYOUT`, and `bytes`, in which padding is zero.
macro_rules! launch_struct {
    ($(#[$about:meta])* struct $name:ident of $unit:literal { $($(#[$field_about:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        struct $name {
            $($(#[$field_about])* $field: $type,)*
        }

        impl $name {
            /// For the `structs` of its unit.
            const LAYOUT: $crate::backend::device::StructLayout = $crate::backend::device::StructLayout {
                unit: $unit,
                name: stringify!($name),
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: &[$((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>())),*],
            };

            /// As it stands in memory.
            fn bytes(&self) -> [u8; size_of::<$name>()] {
                let mut bytes = [0; size_of::<$name>()];
                $(bytes[std::mem::offset_of!($name, $field)..][..size_of::<$type>()]
                    .copy_from_slice(&self.$field.to_ne_bytes());)*
                bytes
            }
        }
    };
}
pub(crate) use launch_struct;
