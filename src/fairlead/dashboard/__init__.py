"""The dashboard's page: files that `io.dashboard` serves as they are. Written by hand, nothing is built.

index.html, style.css   the page
app.js                  the stream, and what is drawn from it; `dom.js`, `format.js`, `tables.js`, `charts.js`,
                        `panels.js` and `explain.js` are its parts
uplot.*                 uPlot 1.6.32 (https://github.com/leeoniya/uPlot) as its npm package has it: MIT, see
                        uplot-licence.txt
"""
