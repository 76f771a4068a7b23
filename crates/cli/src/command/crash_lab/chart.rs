//! The chart: two bars per mode.

use std::fmt::Write;

use super::Tally;

/// Size of the picture and of its parts, in pixels.
const WIDTH: u32 = 720;
const HEIGHT: u32 = 400;
const PLOT_TOP: u32 = 80;
const PLOT_BOTTOM: u32 = 340;
const BAR_WIDTH: u32 = 56;
const MARGIN: u32 = 40;

/// What is counted: name, colour, value.
type Series = (&'static str, &'static str, fn(&Tally) -> u64);

const SERIES: [Series; 2] = [
    ("lost", "#c0392b", |tally| tally.lost),
    ("repeated", "#2471a3", |tally| tally.repeated),
];

/// Lost and repeated fills per mode, as a picture that stands alone.
pub(super) fn svg(tallies: &[Tally]) -> String {
    let mut svg = String::new();
    // Writing to a String cannot fail.
    let _infallible = draw(tallies, &mut svg);
    svg
}

fn draw(tallies: &[Tally], svg: &mut String) -> std::fmt::Result {
    let most = SERIES
        .iter()
        .flat_map(|(_, _, value)| tallies.iter().map(value))
        .max();
    let most = most.unwrap_or(0).max(1);
    let crashes = tallies.iter().map(|tally| tally.crashes).max().unwrap_or(0);
    let fills = tallies.iter().map(|tally| tally.fills).max().unwrap_or(0);
    writeln!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="14">
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
<text x="{MARGIN}" y="32" font-size="18">Fills lost and repeated by {crashes} crashes, of {fills}</text>"##
    )?;
    for (index, (name, colour, _)) in (0..).zip(&SERIES) {
        let x = MARGIN + index * 120;
        writeln!(
            svg,
            r##"<rect x="{x}" y="46" width="12" height="12" fill="{colour}"/><text x="{}" y="57">{name}</text>"##,
            x + 18
        )?;
    }
    let columns = u32::try_from(tallies.len()).unwrap_or(1).max(1);
    let column_width = (WIDTH - 2 * MARGIN) / columns;
    for (index, tally) in (0..).zip(tallies) {
        let centre = MARGIN + column_width * index + column_width / 2;
        for (bar, (name, colour, value)) in (0..).zip(&SERIES) {
            let value = value(tally);
            let x = centre - BAR_WIDTH + bar * BAR_WIDTH;
            let height = u64::from(PLOT_BOTTOM - PLOT_TOP) * value / most;
            let y = u64::from(PLOT_BOTTOM) - height;
            writeln!(
                svg,
                r##"<rect x="{x}" y="{y}" width="{BAR_WIDTH}" height="{height}" fill="{colour}"><title>{}: {value} {name}</title></rect>
<text x="{}" y="{}" text-anchor="middle">{value}</text>"##,
                tally.mode,
                x + BAR_WIDTH / 2,
                y - 6
            )?;
        }
        writeln!(
            svg,
            r##"<text x="{centre}" y="{}" text-anchor="middle">{}</text>"##,
            PLOT_BOTTOM + 24,
            tally.mode
        )?;
    }
    writeln!(
        svg,
        r##"<line x1="{MARGIN}" y1="{PLOT_BOTTOM}" x2="{}" y2="{PLOT_BOTTOM}" stroke="#000000"/>
</svg>"##,
        WIDTH - MARGIN
    )
}

#[cfg(test)]
mod tests {
    use teeline_delivery::mode::Mode;

    use super::{PLOT_BOTTOM, PLOT_TOP, Tally, svg};

    #[test]
    fn the_largest_bar_fills_the_plot_and_the_others_are_in_proportion() {
        let tally = |mode, lost, repeated| Tally {
            lost,
            repeated,
            ..Tally::new(mode, false, 1)
        };
        let svg = svg(&[
            tally(Mode::AtMostOnce, 400, 0),
            tally(Mode::AtLeastOnce, 0, 200),
        ]);
        let full = PLOT_BOTTOM - PLOT_TOP;
        for (title, height) in [
            ("at-most-once: 400 lost", full),
            ("at-most-once: 0 repeated", 0),
            ("at-least-once: 0 lost", 0),
            ("at-least-once: 200 repeated", full / 2),
        ] {
            let line = svg.lines().find(|line| line.contains(title)).unwrap();
            assert!(line.contains(&format!(r#"height="{height}""#)), "{line}");
        }
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    }
}
