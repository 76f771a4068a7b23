//! Users and groups of this host by name, as the local files have them.

use std::fs;

/// The number of a user, given by number or by name; `None` when there is none of that name.
#[must_use]
pub fn user(text: &str) -> Option<u32> {
    number(text, "/etc/passwd")
}

/// The number of a group, given by number or by name; `None` when there is none of that name.
#[must_use]
pub fn group(text: &str) -> Option<u32> {
    number(text, "/etc/group")
}

/// The name of a group.
#[must_use]
pub fn group_name(gid: u32) -> Option<String> {
    let entries = fs::read_to_string("/etc/group").ok()?;
    find(&entries, |_, id| id == gid).map(|(name, _)| name.to_owned())
}

fn number(text: &str, path: &str) -> Option<u32> {
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let entries = fs::read_to_string(path).ok()?;
    find(&entries, |name, _| name == text).map(|(_, id)| id)
}

/// The first entry that is looked for, in the form that both files share: name, password, number.
fn find(entries: &str, is_it: impl Fn(&str, u32) -> bool) -> Option<(&str, u32)> {
    entries.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let id = fields.nth(1)?.parse().ok()?;
        is_it(name, id).then_some((name, id))
    })
}

#[cfg(test)]
mod tests {
    use super::{find, group, group_name, user};

    #[test]
    fn root_is_known_by_name_and_number_and_nobody_else_is_made_up() {
        assert_eq!(
            (user("root"), user("0"), group("root")),
            (Some(0), Some(0), Some(0))
        );
        assert_eq!(group_name(0).as_deref(), Some("root"));
        assert_eq!(user("no such user"), None);
        assert_eq!(user("54321"), Some(54_321), "a number needs no entry");
        let entries = "a:x:7:\nbroken\nb:x:x:\nc:x:9:a,b\n";
        assert_eq!(find(entries, |name, _| name == "c"), Some(("c", 9)));
        assert_eq!(find(entries, |name, _| name == "b"), None);
    }
}
