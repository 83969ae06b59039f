#!/bin/sh
# Installs a browser for the tests, without root: scripts/chromium.sh FOLDER makes FOLDER/chromium.
#
# It is npm's build of Chromium for machines without a desktop. It includes the libraries and fonts that it needs.
set -eu
folder=$1
package=@sparticuz/chromium@153.0.0

without() {
    echo "$1: tests will use the system's chromium or google-chrome, if there is one." >&2
    exit 0
}

[ "$(uname -sm)" = "Linux x86_64" ] || without "$package is for Linux on x86-64"
command -v npm > /dev/null || without "npm, which installs $package, was not found"
rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$folder"
npm pack --silent "$package" > /dev/null || without "npm could not download $package"
tar xzf ./*.tgz
node -e '
const { readFileSync, writeFileSync } = require("fs"), { brotliDecompressSync } = require("zlib");
for (const name of ["chromium", "al2023.tar", "fonts.tar"])
    writeFileSync(name, brotliDecompressSync(readFileSync(`package/bin/${name}.br`)));
'
mv chromium headless
chmod +x headless
tar xf al2023.tar
tar xf fonts.tar
rm -r ./*.tgz ./*.tar package
echo "<fontconfig><dir>$folder/fonts</dir><cachedir>$folder/cache</cachedir></fontconfig>" > fonts.conf
cat > wrapper << END
#!/bin/sh
# Without any font, text would have no width.
[ -e /etc/fonts/fonts.conf ] || export FONTCONFIG_FILE="$folder/fonts.conf"
# For this program only: others use libraries of the same names.
LD_LIBRARY_PATH="$folder/lib" exec "$folder/headless" "\$@"
END
chmod +x wrapper
./wrapper --version
# Last: for make, this file means that everything is there.
mv wrapper chromium
