use super::*;

#[test]
fn loads() {
    Contract::load(None).unwrap();
}
