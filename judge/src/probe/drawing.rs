//! Trees as drawings.

use super::Tree;
use std::fmt::Write;

impl Tree {
    fn depth(&self) -> usize {
        // Without recursion along a chain, which may be long.
        let (mut at, mut depth, mut most) = (self, 0, 0);
        while let Tree::Node(children) = at {
            depth += 1;
            let side = children.iter().skip(1).map(Tree::depth).max().unwrap_or(0);
            most = most.max(depth + side);
            at = &children[0];
        }
        most.max(depth)
    }

    /// A drawing: terms in a row, every sum above what it adds.
    pub fn svg(&self, title: &str) -> String {
        let (step, level, margin) = (14.0, 14.0, 24.0);
        let (n, depth) = (self.leaves(), self.depth());
        let (width, height) = (2.0 * margin + step * n as f64, 3.0 * margin + level * depth as f64);
        let title = title.replace('&', "&amp;").replace('<', "&lt;");
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
             role=\"img\"><title>{title}</title>\n<style>text{{font:9px sans-serif;text-anchor:middle;fill:currentColor}}\
             path{{stroke:currentColor;fill:none}}circle{{fill:currentColor}}</style>\n\
             <text x=\"{margin}\" y=\"14\" style=\"text-anchor:start;font-size:12px\">{title}</text>\n"
        );
        let base = height - margin;
        let mut place = 0;
        draw(self, &mut svg, &mut place, &|slot| margin + step * (slot as f64 + 0.5), base, level);
        svg + "</svg>\n"
    }
}

/// Draws a tree and returns where its top is: x and height in levels.
fn draw(
    tree: &Tree,
    svg: &mut String,
    place: &mut usize,
    x: &dyn Fn(usize) -> f64,
    base: f64,
    level: f64,
) -> (f64, usize) {
    match tree {
        Tree::Leaf(i) => {
            let at = x(*place);
            *place += 1;
            let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{:.1}\">{i}</text>", base + 12.0);
            (at, 0)
        }
        Tree::Node(children) => {
            let tops: Vec<_> = children.iter().map(|child| draw(child, svg, place, x, base, level)).collect();
            let height = 1 + tops.iter().map(|(_, height)| *height).max().unwrap_or(0);
            let middle = tops.iter().map(|(x, _)| x).sum::<f64>() / tops.len() as f64;
            let y = |height: usize| base - level * height as f64;
            for (x, below) in tops {
                let _ = writeln!(svg, "<path d=\"M{x:.1} {:.1}V{1:.1}H{middle:.1}\"/>", y(below), y(height));
            }
            let radius = if children.len() > 2 { 4.0 } else { 2.0 };
            let _ = writeln!(svg, "<circle cx=\"{middle:.1}\" cy=\"{:.1}\" r=\"{radius}\"/>", y(height));
            (middle, height)
        }
    }
}
